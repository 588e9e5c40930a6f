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
    assert len(record["rows"]) == 19
    for name, row in record["rows"].items():
        assert "found" in row, (name, row)
    sweep = record["rows"]["sweep over block shapes"]["found"]
    assert all("ms" in tried for kernel in sweep.values() for tried in kernel)
    assert "not measured (interpreted)" in (tmp_path / "bench_gpu.md").read_text()


def test_the_table_in_results_is_of_its_record(bench):
    results = SCRIPTS.parent / "results"
    record = json.loads((results / "bench_gpu.json").read_text())
    assert (results / "bench_gpu.md").read_text() == bench.page(record, bench.rows_of(bench.Sizes()))
