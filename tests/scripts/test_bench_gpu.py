"""The GPU benchmark: it runs from end to end without a GPU, and its table shows nothing that was not measured."""

import importlib
import json

import pytest

from launching import ROOT, run_python

pytest.importorskip("triton", reason="needs Triton, which exists for Linux: pip install 'rsa_hf[gpu]'")

SCRIPTS = ROOT / "scripts"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_gpu")


def empty(**changes):
    head = {"processor": "p", "gpu": "g", "torch": "t", "triton": "t", "transformers": "t", "commit": "c"}
    return {"command": "x", "dry": False, "machine": head, "rounds": 3, "equality": {"": 0.5}, "rows": {}, **changes}


def test_a_row_that_fails_loses_no_other(bench, tmp_path):
    def fail(bench):
        raise RuntimeError("out of memory")

    rows = [bench.Row("first", "", "", fail), bench.Row("second", "", "", lambda bench: {"value": 2.0})]
    record = empty()
    bench.run(record, bench.Bench(bench.DrySizes(), bench.torch.device("cpu")), rows, tmp_path, 60)
    written = json.loads((tmp_path / "bench_gpu.json").read_text())["rows"]
    assert written["first"]["error"] == "RuntimeError: out of memory"
    assert written["second"]["found"] == {"value": 2.0}
    # Without time left, nothing is begun, and what an earlier run found stays, with its card.
    earlier = bench.earlier_rows(tmp_path / "bench_gpu.json", rows[1:])
    record = empty(rows=earlier, machine={"gpu": "another"})
    bench.run(record, bench.Bench(bench.DrySizes(), bench.torch.device("cpu")), rows, tmp_path, -1)
    assert record["rows"] == {"second": {**earlier["second"], "machine": empty()["machine"]}}
    assert record["rows"]["second"]["found"] == {"value": 2.0}


def test_nothing_is_measured_if_the_kernels_are_wrong(bench, monkeypatch):
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", "triton")
    original = bench.solve

    def slightly_wrong(*arguments):
        output = original(*arguments)
        return output * (1.1 if bench.autograd.REQUESTED == "triton" else 1)

    monkeypatch.setattr(bench, "solve", slightly_wrong)
    with pytest.raises(SystemExit, match=r"output is off by .*nothing is reported"):
        bench.Bench(bench.DrySizes(), bench.torch.device("cpu")).equality()


@pytest.mark.slow
def test_everything_runs_in_the_interpreter(tmp_path):
    run_python(SCRIPTS / "bench_gpu.py", "--dry", "--out", tmp_path, code=0, timeout=None)
    record = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert len(record["rows"]) == 18
    for name, row in record["rows"].items():
        assert "found" in row, (name, row)
    sweep = record["rows"]["sweep over block shapes"]["found"]
    assert all("ms" in tried for kernel in sweep.values() for tried in kernel)
    assert "not measured (interpreted)" in (tmp_path / "bench_gpu.md").read_text()


def test_the_table_in_results_is_of_its_record(bench):
    results = SCRIPTS.parent / "results"
    record = json.loads((results / "bench_gpu.json").read_text())
    assert (results / "bench_gpu.md").read_text() == bench.page(record, bench.rows_of(bench.Sizes()))
