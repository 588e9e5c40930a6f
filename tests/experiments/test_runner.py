"""The runner: stored runs, intervals and verdicts, search of learning rates, report, command line."""

import copy
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
from torch.utils.data import default_collate

from experiment_runs import finished
from experiments.__main__ import main
from experiments.byte_models import SHAPES, build
from experiments.runner import processes, runner
from experiments.runner.comparison import Comparison
from experiments.runner.experiment import EXPERIMENTS, Experiment, find_experiment, run_key
from experiments.runner.fit import adamw, batch_loss, default_device, evaluation_steps, fit, shuffled_rows
from experiments.runner.processes import default_jobs, run_all, workers
from experiments.runner.report import keep_total_time, nothing_has_run, write_report
from experiments.runner.runner import FOLDER, RequestError, read_runs, rebuild_results, run_experiment
from experiments.runner.summary import Conclusion, Row, Rows, interval, summarise
from experiments.variants import make_variant
from rsa_hf.plots import panels

NAME = "linear-rnn"  # any experiment


def grid(size, seeds):
    return [{"arm": variant, "seed": seed} for variant in ("rsa", "plain") for seed in range(seeds)]


def grid_of_models(size, seeds):
    return [{"model": model, **each} for model in ("small", "large") for each in grid(size, seeds)]


def conclude(rows):
    rsa, plain = (rows.find("loss", arm=variant)[0] for variant in ("rsa", "plain"))
    verdict = "confirmed" if rsa.high < plain.low else "not confirmed"
    return Conclusion(
        verdict, f"{rsa.mean:.2f} in short", f"{rsa.mean:.2f} | {plain.mean:.2f}", (f"{rsa.seeds} seeds", "one more")
    )


def draw(results, path):
    with panels(path, 1) as [axes]:
        axes.plot([result.values["loss"] for result in results])


@pytest.fixture
def counted():
    """An experiment, and the list of the settings that it has run."""
    ran = []

    def measure(settings):
        ran.append(dict(settings))
        return {"loss": (1.0 if settings["arm"] == "rsa" else 2.0) + 0.1 * settings["seed"], "curve": [1.0, 2.0]}

    return Experiment(NAME, "A claim.", "1.5", {"toy": 3, "quick": 3, "full": 5}, grid, measure, conclude, draw), ran


def test_an_experiment_writes_its_files(counted, tmp_path):
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
    assert configuration["cells"] == grid("toy", 3)


def test_an_interrupted_experiment_continues_where_it_stopped(counted, tmp_path):
    experiment, ran = counted

    def breaks(settings):
        if len(ran) == 4:
            raise KeyboardInterrupt
        return experiment.measure(settings)

    with pytest.raises(KeyboardInterrupt):
        run_experiment(replace(experiment, measure=breaks), "toy", tmp_path, progress=False)
    assert len(read_runs(tmp_path / FOLDER / NAME / "toy")) == 4
    run_experiment(experiment, "toy", tmp_path, progress=False)
    assert ran == grid("toy", 3)  # each once
    run_experiment(experiment, "toy", tmp_path, seeds=4, progress=False)
    assert len(ran) == 8
    # A new revision repeats all runs.
    run_experiment(replace(experiment, revision=2), "toy", tmp_path, progress=False)
    assert len(ran) == 14


def test_the_configuration_names_the_versions_of_the_runs(counted, tmp_path, monkeypatch):
    experiment, _ = counted
    named = []
    for torch_version, seeds in (("2.13", 2), ("2.14", 3), ("2.15", 3)):  # nothing is left to run for the last one
        monkeypatch.setattr(processes, "versions", lambda torch_version=torch_version: {"torch": torch_version})
        run_experiment(experiment, "toy", tmp_path, seeds=seeds, progress=False)
        named.append(json.loads((tmp_path / FOLDER / NAME / "toy" / "configuration.json").read_text())["versions"])
    assert named == [[{"torch": "2.13"}], *[[{"torch": "2.13"}, {"torch": "2.14"}]] * 2]


def fails_first(settings):
    if settings["seed"] == 0:
        raise FileNotFoundError("no data")
    time.sleep(1)
    return {"seed": settings["seed"], "threads": torch.get_num_threads(), "process": os.getpid()}


def test_workers_are_processes_and_runs_that_finish_after_a_failure_are_kept():
    grid, kept, later = {str(i): {"seed": i} for i in range(12)}, {}, {}
    with workers(2) as executor:
        with pytest.raises(FileNotFoundError, match="no data"):
            kept.update(run_all(fails_first, grid, executor))
        # Runs that had started are kept, the rest are dropped, and the same processes take later runs.
        assert "1" in kept and "11" not in kept
        later.update(run_all(fails_first, {key: grid[key] for key in "23"}, executor))
    assert later.keys() == {"2", "3"}
    for key, run in (kept | later).items():
        assert run.settings == grid[key] and run.values["seed"] == int(key)
        assert run.values["threads"] == max(1, default_jobs() // 2)
    processes = {run.values["process"] for run in (kept | later).values()}
    assert os.getpid() not in processes and len(processes) <= 2


def test_the_error_names_the_line_of_a_damaged_run(counted, tmp_path):
    experiment, _ = counted
    run_experiment(experiment, "toy", tmp_path, progress=False)
    path = tmp_path / FOLDER / NAME / "toy" / "cells.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="line 6.*Delete the line"):
        run_experiment(experiment, "toy", tmp_path, progress=False)


def test_results_are_rebuilt_from_the_stored_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "find_experiment", lambda name: experiment)
    experiment = Experiment(
        NAME, "A claim.", "1.5", {"toy": 3}, grid, lambda settings: {"loss": 1.0 + settings["seed"]}, conclude, draw
    )
    run_experiment(experiment, "toy", tmp_path, seeds=2, progress=False)
    folder = tmp_path / FOLDER / NAME / "toy"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("table.csv", "table.md"):
        (folder / name).unlink()
    (folder / "conclusion.json").write_text("{}")
    rebuild_results(tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # Runs of another revision are left as they are.
    monkeypatch.setattr(runner, "find_experiment", lambda name: replace(experiment, revision=2, claim="Another."))
    rebuild_results(tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_key_of_a_run_depends_on_its_settings_and_the_revision():
    assert run_key({"a": 1, "b": 2}, 1) == run_key({"b": 2, "a": 1}, 1)
    assert len({run_key(settings, r) for settings in ({"a": 1}, {"a": 2}, {"a": 1, "b": 1}) for r in (1, 2)}) == 6


def test_the_interval_uses_students_t():
    # 2.776 is Student's t for 5 values, from a printed table.
    values = [1.0, 2.0, 4.0, 5.0, 9.0]
    mean, low, high = interval(values)
    assert (high - mean) / (statistics.stdev(values) / math.sqrt(5)) == pytest.approx(2.776, abs=5e-4)
    assert mean - low == pytest.approx(high - mean)
    assert math.isnan(interval([1.0])[1])
    # One diverged run leaves no interval, but a row in the table.
    for diverged in (math.nan, math.inf):
        assert not any(map(math.isfinite, interval([1.0, diverged, 2.0])))
    assert Row({}, "loss", *interval([1.0, math.nan]), 2).text(".2f") == "nan (no interval)"
    assert Row({}, "loss", *interval([1.0]), 1).text(".2f") == "1.00 (one seed)"
    assert Row({}, "loss", 1.0, 0.5, 2.0, 3).scaled(-2) == Row({}, "loss", -2.0, -4.0, -1.0, 3)


@pytest.mark.parametrize(
    ("intervals", "verdict", "undecided"),
    [
        ([(0.5, 0.4, 0.6), (0.9, 0.85, 0.95)], "confirmed", 0),
        ([(0.5, 0.4, 0.6), (0.9, 0.8, 1.0)], "not measurable at this size", 1),
        ([(0.5, 0.4, 0.6), (1.1, 0.8, 1.4)], "not measurable at this size", 1),
        ([(0.5, 0.4, 0.6), (1.0, 1.0, 1.0)], "not confirmed", 0),
        ([(0.5, 0.4, 0.6), (math.inf, math.nan, math.nan)], "not confirmed", 0),
        ([(0.5, math.nan, math.nan)], "not measurable at this size", 1),
        ([(1.0, math.nan, math.nan)], "not confirmed", 1),
    ],
)
def test_the_verdict_follows_from_the_intervals(intervals, verdict, undecided):
    rows = Rows(Row({}, "ratio", *each, 3) for each in intervals)
    assert rows.judge(1) == verdict
    words = f" {undecided} of {len(rows)} comparisons are undecided (the interval contains 1" if undecided else ""
    assert rows.undecided(1).startswith(words) and bool(rows.undecided(1)) == bool(undecided)


def test_a_row_summarises_runs_that_differ_in_their_seed_alone():
    results = [
        finished({"arm": variant, "length": n, "seed": seed}, {"loss": n + seed, "curve": [1.0]})
        for variant in ("rsa", "plain")
        for n in (1, 2)
        for seed in (0, 1)
    ]
    # The settings of stored runs may be in another order.
    results[1] = replace(results[1], settings=dict(reversed(results[1].settings.items())))
    rows = summarise(results)
    assert [(row.settings["arm"], row.settings["length"], row.measure) for row in rows] == [
        *(("rsa", 1, "loss"), ("rsa", 2, "loss"), ("plain", 1, "loss"), ("plain", 2, "loss"))
    ]
    assert [row.mean for row in rows.find("loss", length=2)] == [2.5, 2.5]
    assert {arm: each.span(".1f") for arm, each in rows.by("arm").items()} == {
        "rsa": "1.5 to 2.5",
        "plain": "1.5 to 2.5",
    }
    assert rows.find("loss", length=1, arm="rsa").span("+.2f") == "+1.50"


def test_the_report_shows_every_experiment_at_every_size(counted, tmp_path):
    experiment, _ = counted
    against = replace(experiment, measure=lambda settings: {"loss": 2.0 - (settings["arm"] == "plain")})
    run_experiment(against, "toy", tmp_path, progress=False)
    report = write_report(tmp_path).read_text()
    section = report.split(f"## {NAME}\n")[1].split("\n## ")[0]
    assert "* **Not confirmed**: 2.00 | 1.00\n  * 3 seeds\n  * one more\n* Seeds: 3;" in section
    assert f"](results/reproduce/{NAME}/toy/figure.png)" in section
    assert f"`python -m experiments {NAME} --toy`" in section
    for name in EXPERIMENTS:
        assert f"\n## {name}\n" in report
        shown = find_experiment(name)
        remark = f"* Remark: {shown.remark}\n" if shown.remark else ""
        assert f"* Claim: {shown.claim}\n* Published: {shown.published}\n{remark}\n" in report
    assert len(re.findall(r"\*\*Not measured", report)) == 2 * len(EXPERIMENTS)  # neither quick nor full
    assert f"**Not measured**; run `python -m experiments {NAME} --full`." in report
    run_experiment(experiment, "quick", tmp_path, progress=False)
    report = write_report(tmp_path).read_text()
    assert "**Confirmed**: 1.10 | 2.10" in report and "**Not confirmed**: 2.00 | 1.00" in report
    assert f"| [{NAME}](#{NAME}): {EXPERIMENTS[NAME]} | 1.10 in short | confirmed | not measured |" in report
    run_experiment(against, "full", tmp_path, progress=False)
    report = write_report(tmp_path).read_text()
    assert f"| [{NAME}](#{NAME}): {EXPERIMENTS[NAME]} | 2.00 in short | confirmed | not confirmed |" in report


def test_parts_that_run_at_the_same_time_keep_all_runs(counted, tmp_path, monkeypatch):
    experiment, _ = counted
    parts = replace(
        experiment, parts=("arm",), conclude=lambda rows: Conclusion("confirmed", "", "."), draw=lambda *_: None
    )
    write = runner.write_text

    def slowly(path, text):
        time.sleep(0.02)  # so that the other part reads the file before it is written
        if path.name == "cells.jsonl":
            write(path, text)

    monkeypatch.setattr(runner, "write_text", slowly)
    runs = [
        threading.Thread(
            target=run_experiment,
            args=(parts, "quick", tmp_path),
            kwargs={"only": {"arm": [variant]}, "progress": False},
        )
        for variant in ("rsa", "plain")
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(read_runs(tmp_path / FOLDER / NAME / "quick")) == len(parts.grid("quick", parts.seeds["quick"]))


def test_a_part_runs_alone_and_the_report_says_which(counted, tmp_path):
    experiment, ran = counted
    several = replace(
        experiment,
        grid=grid_of_models,
        parts=("model", "arm"),
    )
    run_experiment(several, "quick", tmp_path, only={"model": ["small"]}, progress=False)
    assert len(ran) == 6 and {settings["model"] for settings in ran} == {"small"}
    report = write_report(tmp_path).read_text()
    assert "**Confirmed (6 of 12 runs)**" in report
    assert f"`python -m experiments {NAME} --quick --only model=small`" in report
    assert "* Not measured: model large\n" in report
    run_experiment(several, "quick", tmp_path, only={"model": ["large"], "arm": ["rsa"]}, progress=False)
    assert "**Confirmed (9 of 12 runs)**" in write_report(tmp_path).read_text()
    with pytest.raises(RequestError, match="make no comparison yet; run the other variants too\\.$"):
        run_experiment(replace(several, summarise=lambda results: []), "full", tmp_path, progress=False)
    ran.clear()
    run_experiment(several, "quick", tmp_path, progress=False)
    assert len(ran) == 3  # the plain runs of the large model
    report = write_report(tmp_path).read_text()
    assert "**Confirmed**: 1.10 | 2.10" in report and f"`python -m experiments {NAME} --quick`" in report
    assert "* Not measured: model" not in report
    for only, words in (
        ({"seed": ["1"]}, "cannot be split by 'seed'; allowed: model, arm"),
        ({"model": ["smal"]}, "model=smal is in no run.*small, large"),
    ):
        with pytest.raises(RequestError, match=words):
            run_experiment(several, "quick", tmp_path, only=only)


def test_runs_of_a_gpu_are_kept_on_a_machine_without_one(counted, tmp_path, monkeypatch):
    experiment, ran = counted
    sized = replace(
        experiment,
        grid=grid_of_models,
        parts=("model",),
        needs_gpu=lambda settings: settings["model"] == "large",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_experiment(sized, "quick", tmp_path, progress=False)
    assert {settings["model"] for settings in ran} == {"small"} and len(ran) == 6
    assert "* Not measured: model large\n" in write_report(tmp_path).read_text()
    with pytest.raises(RequestError, match="need a GPU, and there is none here"):
        run_experiment(sized, "quick", tmp_path, only={"model": ["large"]}, progress=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    run_experiment(sized, "quick", tmp_path, progress=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_experiment(sized, "quick", tmp_path, progress=False)
    report = write_report(tmp_path).read_text()
    assert len(ran) == 12 and "Not measured: model" not in report and "; a GPU" in report


def test_the_report_has_the_total_time(tmp_path, counted):
    experiment, _ = counted
    assert nothing_has_run(tmp_path, "quick", [NAME])
    run_experiment(experiment, "quick", tmp_path, progress=False)
    assert not nothing_has_run(tmp_path, "quick", [NAME]) and nothing_has_run(tmp_path, "full", [NAME])
    assert "`python -m experiments all" not in write_report(tmp_path).read_text()
    keep_total_time(tmp_path, "quick", 1623.4, 2)
    assert "`python -m experiments all --quick` took 27 min 3 s from scratch, 2 runs at a time, on" in (
        write_report(tmp_path).read_text()
    )


def test_fit_is_the_training_loop_written_out():
    """With a gradient that is clipped, and a schedule."""
    data = torch.randn(9, 4, 3, generator=torch.Generator().manual_seed(0)) * 10

    def fresh():
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1).eval()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, schedule = fresh()
    model.train()
    losses = []
    for batch in data:
        optimizer.zero_grad()
        losses.append(model(batch).square().mean())
        losses[-1].backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= min(1.0, 1 / float(norm))
        optimizer.step()
        schedule.step()
    found, seen = fresh(), []

    def loss(step):
        assert found[0].training  # also after an evaluation
        return found[0](data[step - 1]).square().mean()

    def after_step(step, value):
        found[0].eval()
        seen.append(float(value))
        return step == 20

    assert fit(loss, found[1], 9, model=found[0], schedule=found[2], after_step=after_step) == 9
    assert seen == pytest.approx([float(value.detach()) for value in losses], rel=1e-4)
    for p, q in zip(model.parameters(), found[0].parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert fit(loss, found[1], 9, model=found[0], after_step=lambda step, _: step == 4) == 4


@pytest.mark.parametrize("variant", ["plain", "rsa", "no recurrence"])
def test_rows_of_one_size_train_as_any_others(variant):
    """On a GPU their passes are CUDA graphs."""
    shape, device = SHAPES["0.03M"], default_device()
    rows = [
        {"input_ids": row, "labels": row}
        for row in torch.randint(256, (24, shape.block), generator=torch.Generator().manual_seed(0))
    ]
    torch.manual_seed(1)
    models = [make_variant(variant, build("llama", shape), shape.block).to(device)]
    models.append(copy.deepcopy(models[0]))
    losses = []
    for model, collate in zip(models, (default_collate, None), strict=True):
        seen = []
        loss = batch_loss(model, rows, shape.batch, 2, collate, skip=1)
        fit(loss, adamw(model, 1e-2), 6, model=model, after_step=lambda _, value, seen=seen: seen.append(float(value)))
        losses.append(seen)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0][-1] < losses[0][0]
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(found, expected)


def test_rows_are_shuffled_anew_for_each_pass():
    batches = shuffled_rows(5, 2, seed=3)
    rows = [row for _ in range(10) for row in next(batches)]
    passes = [rows[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(each) == [0, 1, 2, 3, 4] for each in passes) and len(set(map(tuple, passes))) > 1
    assert rows[:2] == next(shuffled_rows(5, 2, seed=3)) and len(next(shuffled_rows(2, 5, seed=3))) == 5


def test_evaluations_are_evenly_spaced():
    assert evaluation_steps(20, 4) == {5, 10, 15, 20}
    assert evaluation_steps(10, 3) == {3, 7, 10}


RATES = (1e-3, 3e-3, 1e-2)


def searched_grid(size, seeds):
    return [{**each, "learning_rate": rate} for each in grid(size, seeds) for rate in RATES]


def searched_loss(settings):
    # RSA is best at 1e-2 with the first seed, and at 1e-3 with the others.
    if settings["arm"] == "plain":
        return 2.0 + 0.01 * settings["seed"] + (settings["learning_rate"] != 3e-3)
    return 1.0 + 0.01 * settings["seed"] + (settings["learning_rate"] != (1e-2 if settings["seed"] == 0 else 1e-3))


def loss(run):
    return run.values["loss"]


def columns(case, arm):
    return {"loss": case.values(arm, "loss"), "learning rate": case.values(arm, "learning_rate")}


at_best = Comparison((), ("rsa", "plain"), loss, columns).summarise


def table(root, measure):
    with (root / FOLDER / NAME / "quick" / "table.csv").open() as file:
        return {row["arm"]: row for row in csv.DictReader(file) if row["measure"] == measure}


def test_learning_rates_are_searched_with_the_first_seed(counted, tmp_path):
    experiment, _ = counted
    ran = []

    def measure(settings):
        ran.append(dict(settings))
        return {"loss": searched_loss(settings)}

    searching = replace(
        experiment, grid=searched_grid, measure=measure, summarise=at_best, search_by=loss, parts=("arm",)
    )
    run_experiment(searching, "quick", tmp_path, progress=False)
    assert [settings for settings in ran if settings["seed"] == 0] == searched_grid("quick", 1)
    later = [(settings["arm"], settings["learning_rate"], settings["seed"]) for settings in ran if settings["seed"]]
    assert sorted(later) == [("plain", 3e-3, 1), ("plain", 3e-3, 2), ("rsa", 1e-2, 1), ("rsa", 1e-2, 2)]
    # The table keeps the rate that the first seed chose, for all seeds.
    found = table(tmp_path, "loss")["rsa"]
    assert float(table(tmp_path, "learning rate")["rsa"]["mean"]) == pytest.approx(0.01) and found["seeds"] == "3"
    assert float(found["mean"]) == pytest.approx((1.0 + 2.01 + 2.02) / 3)
    configuration = json.loads((tmp_path / FOLDER / NAME / "quick" / "configuration.json").read_text())
    assert len(configuration["cells"]) == configuration["planned"] == 10
    # More seeds need no new search. Without a search every seed tries every rate.
    ran.clear()
    run_experiment(searching, "quick", tmp_path, seeds=4, progress=False)
    assert {(settings["arm"], settings["learning_rate"], settings["seed"]) for settings in ran} == {
        ("plain", 3e-3, 3),
        ("rsa", 1e-2, 3),
    }
    run_experiment(replace(searching, search_by=None), "quick", tmp_path, progress=False)
    assert float(table(tmp_path, "learning rate")["rsa"]["mean"]) == pytest.approx(0.001)


def test_a_rate_at_which_training_diverges_is_not_chosen(counted, tmp_path):
    def measure(settings):
        return {"loss": math.nan if settings["learning_rate"] == min(RATES) else searched_loss(settings)}

    experiment = replace(counted[0], grid=searched_grid, measure=measure, summarise=at_best, search_by=loss)
    run_experiment(experiment, "quick", tmp_path, progress=False)
    found = table(tmp_path, "learning rate")
    assert {arm: float(row["mean"]) for arm, row in found.items()} == pytest.approx({"rsa": 0.01, "plain": 0.003})


def test_an_interrupted_search_shows_no_unfinished_variant(counted, tmp_path):
    experiment, _ = counted
    ran = []

    def breaks(settings):
        if settings["arm"] == "plain" and settings["seed"] == 2:
            raise KeyboardInterrupt
        ran.append(settings)
        return {"loss": searched_loss(settings)}

    searching = replace(experiment, grid=searched_grid, measure=breaks, search_by=loss, parts=("arm",))
    with pytest.raises(KeyboardInterrupt):
        run_experiment(searching, "quick", tmp_path, progress=False)
    shown = []
    looking = replace(searching, summarise=lambda results: shown.extend(results) or [])
    with pytest.raises(RequestError, match="make no comparison yet"):
        run_experiment(looking, "quick", tmp_path, only={"arm": ["rsa"]}, progress=False)
    assert {result.settings["arm"] for result in shown} == {"rsa"} and len(shown) == 5


def test_an_unknown_experiment_is_refused():
    with pytest.raises(ValueError, match="there is no experiment 'linear_rnn'; choose from .*linear-rnn"):
        find_experiment("linear_rnn")


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def reproduce(capsys, tmp_path):
    """Run `python -m experiments` in this process; returns its exit code, standard output and standard error."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments), "--out", str(tmp_path)])
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", ["list", "report", "page"])
def test_list_and_report_take_no_settings_of_a_run(reproduce, name):
    code, out, err = reproduce(name, "--seeds", 3, "--only", "arm=rsa")
    assert (code, out) == (2, "") and f"--seeds, --only: {name} runs no experiment" in err


def test_list_names_every_experiment_and_writes_nothing(reproduce, tmp_path):
    code, out, _ = reproduce("list")
    assert code == 0 and all(name in out for name in EXPERIMENTS)
    assert not (tmp_path / "RESULTS.md").exists()


@pytest.mark.parametrize("name", ["report", "page"])
def test_report_writes_the_page(reproduce, tmp_path, name):
    code, _, _ = reproduce(name)
    assert code == 0 and (tmp_path / "RESULTS.md").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sample-efficiency", "--only", "model"], "SETTING=VALUE"),
        (["all", "--only", "a=b"], "Name it instead of all"),
        (["sample-efficiency", "--only", "model=2M"], "model=2M is in no run of this size; choose from 0.1M"),
        (["linear-rnnn"], "there is no experiment 'linear-rnnn'"),
    ],
)
def test_wrong_arguments_are_refused(reproduce, arguments, words):
    code, _, err = reproduce(*arguments)
    assert code == 2 and words in err
