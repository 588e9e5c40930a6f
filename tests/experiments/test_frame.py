"""The frame: what is kept, what is run again, what the intervals are, and that a page says what was not measured."""

import csv
import json
import math
import os
import re
import statistics
import threading
import time
from dataclasses import replace

import pytest
import torch

from rsa_hf import cli
from rsa_hf.experiments.runner import processes, runner
from rsa_hf.experiments.runner.cells import Result
from rsa_hf.experiments.runner.conclusion import Conclusion, judge, undecided
from rsa_hf.experiments.runner.experiment import EXPERIMENTS, Experiment, cell_key, find_experiment
from rsa_hf.experiments.runner.page import write_page
from rsa_hf.experiments.runner.processes import Workers, default_jobs, run_cells
from rsa_hf.experiments.runner.runner import FOLDER, RequestError, read_results, run_experiment
from rsa_hf.experiments.runner.summary import Row, at_best_rate, find_rows, in_words, interval, summarise
from rsa_hf.experiments.runner.whole_run import is_fresh, keep_time, time_in_words
from rsa_hf.plots import panels

NAME = "linear-rnn"  # any of them; the frame does not look at what they are


def cells(size, seeds):
    return [{"arm": arm, "seed": seed} for arm in ("rsa", "plain") for seed in range(seeds)]


def conclude(rows):
    rsa, plain = (find_rows(rows, "loss", arm=arm)[0] for arm in ("rsa", "plain"))
    verdict = "confirmed" if rsa.high < plain.low else "not confirmed"
    return Conclusion(verdict, f"{rsa.mean:.2f} | {plain.mean:.2f}", (f"{rsa.seeds} seeds", "one more"))


def draw(results, path):
    with panels(path, 1) as [axes]:
        axes.plot([result.values["loss"] for result in results])


@pytest.fixture
def counted():
    """An experiment and the cells that it has run."""
    ran = []

    def run_cell(cell):
        ran.append(dict(cell))
        return {"loss": (1.0 if cell["arm"] == "rsa" else 2.0) + 0.1 * cell["seed"], "curve": [1.0, 2.0]}

    return Experiment(NAME, "A claim.", "1.5", {"toy": 3, "quick": 3, "full": 5}, cells, run_cell, conclude, draw), ran


def test_a_run_writes_everything(counted, tmp_path):
    experiment, ran = counted
    conclusion = run_experiment(experiment, "toy", tmp_path, progress=False)
    folder = tmp_path / FOLDER / NAME / "toy"
    assert {path.name for path in folder.iterdir()} - {".lock"} == {
        *("cells.jsonl", "table.csv", "table.md", "figure.png", "conclusion.json", "configuration.json")
    }
    assert conclusion.verdict == "confirmed" and len(ran) == 6
    with (folder / "table.csv").open() as file:
        [rsa, plain] = csv.DictReader(file)
    assert (rsa["arm"], rsa["measure"], rsa["seeds"]) == ("rsa", "loss", "3")
    assert float(plain["mean"]) == pytest.approx(2.1)
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    configuration = json.loads((folder / "configuration.json").read_text())
    assert configuration["cells"] == cells("toy", 3)


def test_a_run_that_was_broken_off_goes_on(counted, tmp_path):
    experiment, ran = counted

    def breaks(cell):
        if len(ran) == 4:
            raise KeyboardInterrupt
        return experiment.run_cell(cell)

    with pytest.raises(KeyboardInterrupt):
        run_experiment(replace(experiment, run_cell=breaks), "toy", tmp_path, progress=False)
    assert len(read_results(tmp_path / FOLDER / NAME / "toy")) == 4
    run_experiment(experiment, "toy", tmp_path, progress=False)
    assert ran == cells("toy", 3)  # each once
    run_experiment(experiment, "toy", tmp_path, seeds=4, progress=False)
    assert len(ran) == 8
    # What a cell means has changed: all are run again.
    run_experiment(replace(experiment, revision=2), "toy", tmp_path, progress=False)
    assert len(ran) == 14


def test_versions_are_those_that_the_cells_ran_with(counted, tmp_path, monkeypatch):
    experiment, _ = counted
    named = []
    for torch_version, seeds in (("2.13", 2), ("2.14", 3), ("2.15", 3)):  # with the last one, no cell
        monkeypatch.setattr(processes, "versions", lambda torch_version=torch_version: {"torch": torch_version})
        run_experiment(experiment, "toy", tmp_path, seeds=seeds, progress=False)
        named.append(json.loads((tmp_path / FOLDER / NAME / "toy" / "configuration.json").read_text())["versions"])
    assert named == [[{"torch": "2.13"}], *[[{"torch": "2.13"}, {"torch": "2.14"}]] * 2]


def test_what_another_process_has_run_meanwhile_is_kept(counted, tmp_path):
    experiment, ran = counted
    apart = replace(experiment, parts=("arm",))

    def meets_another(cell):
        if cell["seed"] == 1:
            other = replace(apart, conclude=lambda rows: Conclusion("not confirmed", "One arm alone."))
            run_experiment(other, "toy", tmp_path, only={"arm": ["plain"]}, progress=False)
        return experiment.run_cell(cell)

    run_experiment(replace(apart, run_cell=meets_another), "toy", tmp_path, only={"arm": ["rsa"]}, progress=False)
    assert len(read_results(tmp_path / FOLDER / NAME / "toy")) == len(ran) == 6


def square(cell):
    if cell["seed"] == 3:
        time.sleep(1)  # the others are done by then
        raise FileNotFoundError("no data")
    return {"loss": float(cell["seed"] ** 2), "threads": torch.get_num_threads(), "process": os.getpid()}


def test_cells_run_in_processes_of_their_own():
    cells = {str(i): {"seed": i} for i in range(4)}
    found = {}
    with Workers(2) as workers:
        with pytest.raises(FileNotFoundError, match="no data"):
            found.update(run_cells(square, cells, workers))
        assert found
        processes = {result.values["process"] for result in found.values()}
        # The same processes take what comes next as well.
        del cells["3"]
        found.update(run_cells(square, cells, workers))
        processes |= {result.values["process"] for result in found.values()}
    assert found.keys() == cells.keys()
    for key, result in found.items():
        assert result.cell == cells[key] and result.values["loss"] == cells[key]["seed"] ** 2
        assert result.values["threads"] == max(1, default_jobs() // 2)
    assert os.getpid() not in processes and len(processes) <= 2


def fails_first(cell):
    if cell["seed"] == 0:
        raise FileNotFoundError("no data")
    time.sleep(1)
    return {"loss": 1.0}


def test_cells_that_run_while_another_fails_are_kept():
    found = {}
    with Workers(2) as workers, pytest.raises(FileNotFoundError, match="no data"):
        found.update(run_cells(fails_first, {str(i): {"seed": i} for i in range(12)}, workers))
    assert "1" in found and "11" not in found


def test_numbers_below_one_are_told(counted, tmp_path):
    with pytest.raises(ValueError, match="seeds is 0; at least 1"):
        run_experiment(counted[0], "toy", tmp_path, seeds=0)
    with pytest.raises(ValueError, match="jobs is 0; at least 1"):
        Workers(0)


def test_a_damaged_cell_is_told(counted, tmp_path):
    experiment, _ = counted
    run_experiment(experiment, "toy", tmp_path, progress=False)
    path = tmp_path / FOLDER / NAME / "toy" / "cells.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="line 6.*delete the line"):
        run_experiment(experiment, "toy", tmp_path, progress=False)


def test_the_key_of_a_cell_is_of_its_settings():
    assert cell_key({"a": 1, "b": 2}, 1) == cell_key({"b": 2, "a": 1}, 1)
    assert len({cell_key(cell, r) for cell in ({"a": 1}, {"a": 2}, {"a": 1, "b": 1}) for r in (1, 2)}) == 6


def test_the_interval_covers_the_truth_as_often_as_it_says():
    # Student's t for 5 values: 2.776, from a printed table.
    values = [1.0, 2.0, 4.0, 5.0, 9.0]
    mean, low, high = interval(values)
    assert (high - mean) / (statistics.stdev(values) / math.sqrt(5)) == pytest.approx(2.776, abs=5e-4)
    assert mean - low == pytest.approx(high - mean)
    assert math.isnan(interval([1.0])[1])
    # A run that diverged has no score, and costs the others their interval, not the experiment its table.
    for diverged in (math.nan, math.inf):
        assert not any(map(math.isfinite, interval([1.0, diverged, 2.0])))
    assert in_words(Row({}, "loss", *interval([1.0, math.nan]), 2), ".2f") == "nan (no interval)"
    assert in_words(Row({}, "loss", *interval([1.0]), 1), ".2f") == "1.00 (one seed)"
    with pytest.raises(ValueError):
        interval([])


def row(mean, low=math.nan, high=math.nan):
    return Row({}, "ratio", mean, low, high, 3)


@pytest.mark.parametrize(
    ("rows", "verdict", "open_ones"),
    [
        ([row(0.5, 0.4, 0.6), row(0.9, 0.85, 0.95)], "confirmed", 0),
        ([row(0.5, 0.4, 0.6), row(0.9, 0.8, 1.0)], "not measurable at this size", 1),
        ([row(0.5, 0.4, 0.6), row(1.1, 0.8, 1.4)], "not measurable at this size", 1),
        ([row(0.5, 0.4, 0.6), row(1.0, 1.0, 1.0)], "not confirmed", 0),
        ([row(0.5, 0.4, 0.6), row(math.inf)], "not confirmed", 0),
        ([row(0.5)], "not measurable at this size", 1),
        ([row(1.0)], "not confirmed", 1),
    ],
)
def test_the_rule_by_which_intervals_make_a_verdict(rows, verdict, open_ones):
    assert judge(rows, 1) == verdict
    words = undecided(rows, 1)
    assert f"In {open_ones} of {len(rows)} the interval holds 1" in words if open_ones else words == ""
    with pytest.raises(ValueError, match="no comparison"):
        judge([], 1)


def test_rows_are_of_cells_that_differ_in_their_seed_alone():
    results = [
        Result({"arm": arm, "length": n, "seed": seed}, {"loss": n + seed, "curve": [1.0]}, 1.0, "m", {})
        for arm in ("rsa", "plain")
        for n in (1, 2)
        for seed in (0, 1)
    ]
    rows = summarise(results)
    assert [(row.settings["arm"], row.settings["length"], row.measure) for row in rows] == [
        *(("rsa", 1, "loss"), ("rsa", 2, "loss"), ("plain", 1, "loss"), ("plain", 2, "loss"))
    ]
    assert [row.mean for row in find_rows(rows, "loss", length=2)] == [2.5, 2.5]


def test_the_page_shows_what_was_measured_and_what_was_not(counted, tmp_path):
    experiment, _ = counted
    against = replace(experiment, run_cell=lambda cell: {"loss": 2.0 - (cell["arm"] == "plain")})
    run_experiment(against, "toy", tmp_path, progress=False)
    page = write_page(tmp_path).read_text()
    section = page.split(f"## {NAME}\n")[1].split("\n## ")[0]
    assert "* **Not confirmed**: 2.00 | 1.00\n  * 3 seeds\n  * one more\n* Seeds: 3;" in section
    assert f"](results/reproduce/{NAME}/toy/figure.png)" in section
    assert f"`rsa-hf reproduce {NAME} --toy`" in section
    for name in EXPERIMENTS:
        assert f"\n## {name}\n" in page
        shown = find_experiment(name)
        remark = f"* Remark: {shown.remark}\n" if shown.remark else ""
        assert f"* Claim: {shown.claim}\n* Published: {shown.published}\n{remark}\n" in page
    assert len(re.findall(r"\*\*Not measured", page)) == 2 * len(EXPERIMENTS)  # neither quick nor full
    # Every size is shown.
    run_experiment(experiment, "quick", tmp_path, progress=False)
    page = write_page(tmp_path).read_text()
    assert "**Confirmed**: 1.10 | 2.10" in page and "**Not confirmed**: 2.00 | 1.00" in page
    assert f"| [{NAME}](#{NAME}) | confirmed | not measured |" in page
    assert f"**Not measured**; `rsa-hf reproduce {NAME} --full` measures it." in page


def test_parts_that_run_at_the_same_time_lose_no_cell(counted, tmp_path, monkeypatch):
    experiment, _ = counted
    parts = replace(
        experiment, parts=("arm",), conclude=lambda rows: Conclusion("confirmed", "."), draw=lambda *_: None
    )
    write = runner._write

    def slowly(path, text):
        time.sleep(0.02)  # for the other one to read what is there before this
        if path.name == "cells.jsonl":  # the rest is each one's own
            write(path, text)

    monkeypatch.setattr(runner, "_write", slowly)
    runs = [
        threading.Thread(
            target=run_experiment, args=(parts, "quick", tmp_path), kwargs={"only": {"arm": [arm]}, "progress": False}
        )
        for arm in ("rsa", "plain")
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(read_results(tmp_path / FOLDER / NAME / "quick")) == len(parts.cells("quick", parts.seeds["quick"]))


def test_a_part_is_run_alone_and_shown_as_one(counted, tmp_path):
    experiment, ran = counted
    several = replace(
        experiment,
        cells=lambda size, seeds: [{"model": m, **cell} for m in ("small", "large") for cell in cells(size, seeds)],
        parts=("model", "arm"),
    )
    run_experiment(several, "quick", tmp_path, only={"model": ["small"]}, progress=False)
    assert len(ran) == 6 and {cell["model"] for cell in ran} == {"small"}
    page = write_page(tmp_path).read_text()
    assert "**Confirmed (6 of 12 cells run)**" in page
    assert f"`rsa-hf reproduce {NAME} --quick --only model=small`" in page
    assert "* Not measured: model large\n" in page
    run_experiment(several, "quick", tmp_path, only={"model": ["large"], "arm": ["rsa"]}, progress=False)
    assert "**Confirmed (9 of 12 cells run)**" in write_page(tmp_path).read_text()
    with pytest.raises(RequestError, match="makes no comparison yet; run the other arms too\\.$"):
        run_experiment(replace(several, summarise=lambda results: []), "full", tmp_path, progress=False)
    ran.clear()
    run_experiment(several, "quick", tmp_path, progress=False)
    assert len(ran) == 3  # the plain ones of the large model
    page = write_page(tmp_path).read_text()
    assert "**Confirmed**: 1.10 | 2.10" in page and f"`rsa-hf reproduce {NAME} --quick`" in page
    assert "* Not measured: model" not in page
    for only, words in (
        ({"seed": ["1"]}, "no parts by 'seed'; allowed: model, arm"),
        ({"model": ["smal"]}, "model=smal is in no cell.*small, large"),
    ):
        with pytest.raises(RequestError, match=words):
            run_experiment(several, "quick", tmp_path, only=only)


def test_what_a_gpu_has_measured_stays_where_there_is_none(counted, tmp_path, monkeypatch):
    experiment, ran = counted
    sized = replace(
        experiment,
        cells=lambda size, seeds: [{"model": m, **cell} for m in ("small", "large") for cell in cells(size, seeds)],
        parts=("model",),
        needs_gpu=lambda cell: cell["model"] == "large",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_experiment(sized, "quick", tmp_path, progress=False)
    assert {cell["model"] for cell in ran} == {"small"} and len(ran) == 6
    assert "* Not measured: model large\n" in write_page(tmp_path).read_text()
    with pytest.raises(RequestError, match="need a GPU, and there is none here"):
        run_experiment(sized, "quick", tmp_path, only={"model": ["large"]}, progress=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    run_experiment(sized, "quick", tmp_path, progress=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_experiment(sized, "quick", tmp_path, progress=False)
    page = write_page(tmp_path).read_text()
    assert len(ran) == 12 and "Not measured: model" not in page and "; a GPU" in page


def test_words_among_the_settings_are_explained(counted, tmp_path):
    experiment, _ = counted
    run_experiment(replace(experiment, meanings=lambda cells: {"arm": {"rsa": len(cells)}}), "toy", tmp_path)
    configuration = json.loads((tmp_path / FOLDER / NAME / "toy" / "configuration.json").read_text())
    assert configuration["meanings"] == {"arm": {"rsa": 6}}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_meanings_are_of_words_that_occur(name):
    experiment = find_experiment(name)
    found = [*experiment.cells("quick", 1)]
    meanings = json.loads(json.dumps(experiment.meanings(found), allow_nan=False))
    settings = {setting for cell in found for setting in cell}
    assert meanings.keys() <= settings | {"arm"}  # a cell of search-heads has all arms


def test_the_time_of_a_whole_run_is_kept(tmp_path, counted):
    experiment, _ = counted
    assert is_fresh(tmp_path, "quick", [NAME]) and time_in_words(tmp_path, "quick") == ""
    run_experiment(experiment, "quick", tmp_path, progress=False)
    assert not is_fresh(tmp_path, "quick", [NAME]) and is_fresh(tmp_path, "full", [NAME])
    keep_time(tmp_path, "quick", 1623.4, 2)
    assert "`rsa-hf reproduce all --quick`, with nothing kept from before, took 27 min 3 s, 2 cells" in (
        write_page(tmp_path).read_text()
    )


RATES = (1e-3, 3e-3, 1e-2)


def searched_cells(size, seeds):
    return [{**cell, "learning_rate": rate} for cell in cells(size, seeds) for rate in RATES]


def searched_loss(cell):
    # With the first seed RSA is best at 1e-2; with the second it would be at 1e-3.
    if cell["arm"] == "plain":
        return 2.0 + 0.01 * cell["seed"] + (cell["learning_rate"] != 3e-3)
    return 1.0 + 0.01 * cell["seed"] + (cell["learning_rate"] != (1e-2 if cell["seed"] == 0 else 1e-3))


def loss(result):
    return result.number("loss")


def at_best(results):
    best = at_best_rate(results, (), ("rsa", "plain"), loss)
    return summarise([result for _, arms in best for runs in arms.values() for result in runs])


def test_learning_rates_are_searched_with_the_first_seed(counted, tmp_path):
    experiment, _ = counted
    ran = []

    def run_cell(cell):
        ran.append(dict(cell))
        return {"loss": searched_loss(cell)}

    searching = replace(
        experiment, cells=searched_cells, run_cell=run_cell, summarise=at_best, search_by=loss, parts=("arm",)
    )
    run_experiment(searching, "quick", tmp_path, progress=False)
    assert [cell for cell in ran if cell["seed"] == 0] == searched_cells("quick", 1)
    later = [(cell["arm"], cell["learning_rate"], cell["seed"]) for cell in ran if cell["seed"]]
    assert sorted(later) == [("plain", 3e-3, 1), ("plain", 3e-3, 2), ("rsa", 1e-2, 1), ("rsa", 1e-2, 2)]
    with (tmp_path / FOLDER / NAME / "quick" / "table.csv").open() as file:
        found = {row["arm"]: row for row in csv.DictReader(file)}
    # The search looks at the first seed alone, in the table too.
    assert (found["rsa"]["learning_rate"], found["rsa"]["seeds"]) == ("0.01", "3")
    assert float(found["rsa"]["mean"]) == pytest.approx((1.0 + 2.01 + 2.02) / 3)
    configuration = json.loads((tmp_path / FOLDER / NAME / "quick" / "configuration.json").read_text())
    assert len(configuration["cells"]) == configuration["planned"] == 10
    # More seeds need no new search; without a search every seed tries every rate.
    ran.clear()
    run_experiment(searching, "quick", tmp_path, seeds=4, progress=False)
    assert {(cell["arm"], cell["learning_rate"], cell["seed"]) for cell in ran} == {
        ("plain", 3e-3, 3),
        ("rsa", 1e-2, 3),
    }
    run_experiment(replace(searching, search_by=None), "quick", tmp_path, progress=False)
    with (tmp_path / FOLDER / NAME / "quick" / "table.csv").open() as file:
        assert {row["arm"]: row["learning_rate"] for row in csv.DictReader(file)}["rsa"] == "0.001"


def test_a_rate_at_which_training_diverged_is_not_the_best(counted, tmp_path):
    def run_cell(cell):
        return {"loss": math.nan if cell["learning_rate"] == min(RATES) else searched_loss(cell)}

    experiment = replace(counted[0], cells=searched_cells, run_cell=run_cell, summarise=at_best, search_by=loss)
    run_experiment(experiment, "quick", tmp_path, progress=False)
    with (tmp_path / FOLDER / NAME / "quick" / "table.csv").open() as file:
        found = {row["arm"]: row["learning_rate"] for row in csv.DictReader(file)}
    assert found == {"rsa": "0.01", "plain": "0.003"}


def test_a_search_that_is_broken_off_shows_no_arm_that_is_not_done(counted, tmp_path):
    experiment, _ = counted
    ran = []

    def breaks(cell):
        if cell["arm"] == "plain" and cell["seed"] == 2:
            raise KeyboardInterrupt
        ran.append(cell)
        return {"loss": searched_loss(cell)}

    searching = replace(experiment, cells=searched_cells, run_cell=breaks, search_by=loss, parts=("arm",))
    with pytest.raises(KeyboardInterrupt):
        run_experiment(searching, "quick", tmp_path, progress=False)
    shown = []
    looking = replace(searching, summarise=lambda results: shown.extend(results) or [])
    with pytest.raises(RequestError, match="makes no comparison yet"):
        run_experiment(looking, "quick", tmp_path, only={"arm": ["rsa"]}, progress=False)
    assert {result.cell["arm"] for result in shown} == {"rsa"} and len(shown) == 5


def test_names_that_are_not_there_are_told():
    with pytest.raises(ValueError, match="there is no experiment 'linear_rnn'; there are .*linear-rnn"):
        find_experiment("linear_rnn")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["rsa-hf", "reproduce", *map(str, arguments), "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", ["list", "page"])
def test_list_and_page_take_no_settings_of_a_run(run, name):
    code, out, err = run(name, "--seeds", 3, "--only", "arm=rsa")
    assert (code, out) == (2, "") and f"--seeds, --only: {name} runs nothing" in err


def test_list_and_page(run, tmp_path):
    code, out, _ = run("list")
    assert code == 0 and all(name in out for name in EXPERIMENTS)
    assert not (tmp_path / "RESULTS.md").exists()
    code, out, _ = run("page")
    assert code == 0 and (tmp_path / "RESULTS.md").exists()
    for wrong, words in (
        (["sample-efficiency", "--only", "model"], "SETTING=VALUE"),
        (["all", "--only", "a=b"], "name it"),
    ):
        code, _, err = run(*wrong)
        assert code == 2 and words in err
    code, _, err = run("sample-efficiency", "--only", "model=2M")
    assert code == 2 and "model=2M is in no cell of this size; there are 0.1M" in err
    code, _, err = run("linear-rnnn")
    assert code == 2 and err.startswith("error: there is no experiment 'linear-rnnn'")
