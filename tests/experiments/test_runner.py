"""The runner: stored runs, intervals and verdicts, search of learning rates, files, report, command line."""

import json
import math
import statistics
from dataclasses import replace

import pytest
from scipy.stats import t

from experiments.__main__ import main
from experiments.runner.comparison import Comparison, all_measured
from experiments.runner.experiment import EXPERIMENTS, Experiment, RequestError, find_experiment
from experiments.runner.fit import shuffled_rows
from experiments.runner.panels import panels
from experiments.runner.resources import MissingDataError, data_file
from experiments.runner.results_page import write_report
from experiments.runner.runner import FOLDER, read_runs, run_experiment
from experiments.runner.summary import Conclusion, Row, Rows, interval

NAME = "synthetic"  # any experiment


def grid(size, seeds):
    return [{"arm": variant, "seed": seed} for variant in ("rsa", "plain") for seed in range(seeds)]


def conclude(rows):
    rsa, plain = (rows.find("loss", arm=variant)[0] for variant in ("rsa", "plain"))
    verdict = "confirmed" if rsa.high < plain.low else "not confirmed"
    return Conclusion(verdict, f"{rsa.mean:.2f} in short", f"{rsa.mean:.2f} | {plain.mean:.2f}", ("a finding",))


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


def test_an_interrupted_experiment_continues_and_writes_its_files(counted, tmp_path):
    experiment, ran = counted
    folder = tmp_path / FOLDER / NAME / "toy"

    def breaks(settings):
        if len(ran) == 4:
            raise KeyboardInterrupt
        return experiment.measure(settings)

    with pytest.raises(KeyboardInterrupt):
        run_experiment(replace(experiment, measure=breaks), "toy", tmp_path, progress=False)
    assert len(read_runs(folder)) == 4
    assert run_experiment(experiment, "toy", tmp_path, progress=False).verdict == "confirmed"
    assert ran == grid("toy", 3)  # each once
    assert {path.name for path in folder.iterdir()} == {
        *("cells.jsonl", "table.md", "figure.png", "conclusion.json", "configuration.json")
    }
    assert "| plain | loss | 2.1 | 1.852 … 2.348 | 3 |" in (folder / "table.md").read_text()
    assert json.loads((folder / "configuration.json").read_text())["cells"] == grid("toy", 3)
    run_experiment(experiment, "toy", tmp_path, seeds=4, progress=False)
    assert len(ran) == 8
    # A new revision repeats all runs.
    run_experiment(replace(experiment, revision=2), "toy", tmp_path, progress=False)
    assert len(ran) == 14
    (folder / "cells.jsonl").write_text((folder / "cells.jsonl").read_text()[:-20])
    with pytest.raises(RequestError, match="line 14.*Delete the line"):
        run_experiment(experiment, "toy", tmp_path, progress=False)


def test_another_text_is_refused(small_data, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(small_data))
    with pytest.raises(MissingDataError, match="is not the file that the stored runs have read"):
        data_file("enwik8/enwik8_prefix.xz")
    with pytest.raises(MissingDataError, match="does not exist"):
        data_file("enwik8/enwik9.xz")


# --- intervals and verdicts -----------------------------------------------------------------------------------------


def test_the_interval_uses_students_t():
    # 2.776 is Student's t for 5 values, from a printed table.
    values = [1.0, 2.0, 4.0, 5.0, 9.0]
    mean, low, high = interval(values)
    assert (high - mean) / (statistics.stdev(values) / math.sqrt(5)) == pytest.approx(2.776, abs=5e-4)
    assert mean - low == pytest.approx(high - mean)
    # One diverged run leaves no interval, but a row in the table.
    for without in ([1.0], [1.0, math.nan, 2.0], [1.0, math.inf, 2.0], [[1.0, math.inf], [3.0, 3.0]]):
        assert math.isnan(interval(without)[1])
    assert Row({}, "loss", 1.0, 0.5, 2.0, 3).scaled(-2) == Row({}, "loss", -2.0, -4.0, -1.0, 3)


@pytest.mark.parametrize(
    ("intervals", "verdict", "undecided"),
    [
        ([(0.5, 0.4, 0.6), (0.9, 0.85, 0.95)], "confirmed", 0),
        # Alone this one would do, but two are compared.
        ([(0.5, 0.4, 0.6), (0.9, 0.8, 0.99)], "confirmed", 0),
        ([(0.9, 0.8, 0.99), (0.9, 0.8, 0.99)], "not measurable at this size", 2),
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
    assert rows.undecided(1).startswith(f" {undecided} of {len(rows)}" if undecided else "")
    assert bool(rows.undecided(1)) == bool(undecided)


def test_comparisons_that_are_counted_together_are_corrected():
    # Holm (1979): in ascending order p is compared with 0.05 / 4, / 3, / 2 and / 1, until one is larger.
    def row(p, sign):
        mean, half = sign * t.isf(p / 2, 4), t.isf(0.025, 4)
        return Row({}, "difference", mean, mean - half, mean + half, 5)

    rows = Rows(row(p, sign) for p, sign in ((0.01, 1), (0.04, -1), (0.03, -1), (0.005, -1)))
    assert [round(each.p_value(0), 9) for each in rows] == [0.01, 0.04, 0.03, 0.005]
    assert rows.significant(0) == [True, False, False, True]
    assert (rows.below(0), rows.judge(0)) == (1, "not confirmed")
    assert Rows(rows[1:2]).below(0) == 1  # alone


# --- parts and the report -------------------------------------------------------------------------------------------


def test_a_part_runs_alone_and_the_report_says_so(counted, tmp_path):
    experiment, ran = counted
    several = replace(
        experiment,
        grid=lambda size, seeds: [{"model": m, **each} for m in ("small", "large") for each in grid(size, seeds)],
        parts=("model", "arm"),
    )
    run_experiment(several, "quick", tmp_path, only={"model": ["small"]}, progress=False)
    assert len(ran) == 6 and {settings["model"] for settings in ran} == {"small"}
    report = write_report(tmp_path).read_text()
    assert "**Confirmed (6 of 12 runs)**" in report
    for only, words in (
        ({"seed": ["1"]}, "cannot be split by 'seed'; allowed: model, arm"),
        ({"model": ["smal"]}, "model=smal is in no run.*'small', 'large'"),
    ):
        with pytest.raises(RequestError, match=words):
            run_experiment(several, "quick", tmp_path, only=only)


def test_the_report_shows_every_experiment_at_every_size(counted, tmp_path):
    run_experiment(counted[0], "quick", tmp_path, progress=False)
    report = write_report(tmp_path).read_text()
    assert "* **Confirmed**: 1.10 | 2.10\n  * a finding\n* Seeds: 3;" in report
    assert f"](results/reproduce/{NAME}/quick/figure.png)" in report
    assert f"| [{NAME}](#{NAME}): {EXPERIMENTS[NAME]} | 1.10 in short | confirmed | not measured |" in report
    assert report.count("**Not measured**") == 2 * len(EXPERIMENTS) - 1
    for name in EXPERIMENTS:
        assert f"* Claim: {find_experiment(name).claim}\n" in report


# --- training -------------------------------------------------------------------------------------------------------


def test_rows_are_shuffled_anew_for_each_pass():
    batches = shuffled_rows(5, 2, seed=3)
    rows = [row for _ in range(10) for row in next(batches)]
    passes = [rows[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(each) == [0, 1, 2, 3, 4] for each in passes) and len(set(map(tuple, passes))) > 1
    assert rows[:2] == next(shuffled_rows(5, 2, seed=3)) and len(next(shuffled_rows(2, 5, seed=3))) == 5


RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def test_learning_rates_are_searched_with_the_first_seed(counted, tmp_path):
    ran = []

    def measure(settings):
        # RSA is best at 1e-2 with the first seed, and at 1e-3 with the others; the highest rate makes plain diverge.
        ran.append((settings["arm"], settings["learning_rate"], settings["seed"]))
        best = 3e-3 if settings["arm"] == "plain" else 1e-2 if settings["seed"] == 0 else 1e-3
        diverged = settings["arm"] == "plain" and settings["learning_rate"] == 1e-2
        return {"loss": math.nan if diverged else 1.0 + (settings["learning_rate"] != best)}

    def loss(run):
        return run.values["loss"]

    compared = Comparison((), ("rsa", "plain"), loss, all_measured("loss", "learning_rate"))
    searching = replace(
        counted[0],
        grid=lambda size, seeds: [{**each, "learning_rate": rate} for each in grid(size, seeds) for rate in RATES],
        measure=measure,
        summarise=compared.summarise,
        search_by=loss,
    )
    run_experiment(searching, "quick", tmp_path, progress=False)
    # Three rates from the middle, and one beyond the best while that is the last.
    assert sorted(each[:2] for each in ran if each[2] == 0) == [
        *(("plain", rate) for rate in (1e-3, 3e-3, 1e-2)),
        *(("rsa", rate) for rate in (1e-3, 3e-3, 1e-2, 3e-2)),
    ]
    others = [(*best, seed) for best in (("plain", 3e-3), ("rsa", 1e-2)) for seed in (1, 2)]
    assert sorted(each for each in ran if each[2]) == others
    # The table keeps the rate that the first seed chose, for all seeds.
    folder = tmp_path / FOLDER / NAME / "quick"
    table, configuration = (folder / "table.md").read_text(), json.loads((folder / "configuration.json").read_text())
    assert "| rsa | learning rate | 0.01 |" in table and "| plain | learning rate | 0.003 |" in table
    assert len(configuration["cells"]) == configuration["planned"] == 11


def test_the_command_line(capsys, tmp_path):
    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--out", str(tmp_path)])
        return end.value.code or 0, *capsys.readouterr()

    code, out, _ = run("list")
    assert code == 0 and all(name in out for name in (*EXPERIMENTS, "blimp"))
    missing = ["synthetics"], "there is no experiment"
    for arguments, words in ((["language-model", "--only", "model"], "SETTING=VALUE"), missing):
        code, _, err = run(*arguments)
        assert code == 2 and words in err
