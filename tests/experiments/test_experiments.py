"""All experiments: their grids, reproducible runs and verdicts, and the stored runs."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest

from experiment_runs import CASES, conclude, fake_runs
from experiments.runner.experiment import EXPERIMENTS, find_experiment, run_key
from experiments.runner.runner import FOLDER, read_runs, rebuild_results
from experiments.variants import NO_RECURRENCE

RESULTS = Path(__file__).parents[2] / FOLDER
# The first runs of an experiment, which make no comparison yet, are stored without one.
STORED = sorted(path.parent.relative_to(RESULTS) for path in RESULTS.glob("*/*/configuration.json"))


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("size", ["toy", "quick", "full"])
def test_a_grid_has_each_run_once(name, size):
    experiment = find_experiment(name)
    grid = experiment.grid(size, 2)
    assert max(Counter(run_key(settings, experiment.revision) for settings in grid).values()) == 1
    assert len({settings["seed"] for settings in grid}) >= 2
    # `--only` splits its values at commas.
    assert not any("," in str(settings[part]) for settings in grid for part in experiment.parts)
    assert (experiment.search_by is None) or all("learning_rate" in settings for settings in grid)


# --- stored runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", STORED, ids=str)
def test_stored_runs_give_the_stored_figures(folder, tmp_path):
    stored, rebuilt = RESULTS / folder, tmp_path / FOLDER / folder
    shutil.copytree(stored, rebuilt)
    rebuild_results(tmp_path)
    for name in ("table.md", "conclusion.json", "configuration.json"):
        assert (rebuilt / name).read_text() == (stored / name).read_text()
    # Runs whose variant is not finished for every seed are stored too.
    covered = json.loads((stored / "configuration.json").read_text())["cells"]
    runs = [run for run in read_runs(stored).values() if run.settings in covered]
    assert len(runs) == len(covered)
    if (draw := find_experiment(folder.parts[0]).draw) is not None:
        draw(runs, tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_every_stored_run_is_in_the_grid_of_its_size():
    assert len(STORED) >= len(EXPERIMENTS)
    for folder in STORED:
        experiment, size = find_experiment(folder.parts[0]), folder.parts[1]
        grid = {run_key(settings, experiment.revision) for settings in experiment.grid(size, experiment.seeds[size])}
        assert read_runs(RESULTS / folder).keys() <= grid


# --- verdicts -------------------------------------------------------------------------------------------------------

PLAIN = (1.0, 1.1, 1.2)


def verdict(name, rsa, *more, plain=PLAIN):
    return conclude(name, fake_runs(name, "plain", plain), fake_runs(name, "rsa", rsa), *more).verdict


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_can_go_either_way(name):
    without = fake_runs(name, NO_RECURRENCE, PLAIN)
    assert verdict(name, (0.5, 0.56, 0.6), without) == "confirmed"
    assert verdict(name, (1.2, 1.31, 1.4), without) == "not confirmed"
    assert verdict(name, PLAIN, without) == "not confirmed"
    assert verdict(name, (0.5, 1.1, 1.0), without) == "not measurable at this size"
    assert verdict(name, (0.5,), without[:1], plain=PLAIN[:1]) == "not measurable at this size"
    if name not in ("confirmation", "defect", "regular-languages"):  # a gain that no recurrence reaches too
        assert verdict(name, (0.5, 0.56, 0.6), fake_runs(name, NO_RECURRENCE, (0.4, 0.44, 0.47))) == "not confirmed"


@pytest.mark.parametrize("name", [name for name in CASES if name != "regular-languages"])
def test_a_run_that_diverges_alone_counts_against_rsa_but_not_for_it(name):
    without = fake_runs(name, NO_RECURRENCE, PLAIN)
    assert verdict(name, (0.5, math.nan, 0.6), without) == "not confirmed"
    assert verdict(name, (0.5, 0.56, 0.6), without, plain=(1.0, math.nan, 1.2)) == "not measurable at this size"


@pytest.mark.parametrize("name", CASES)
def test_one_lost_case_is_enough_for_not_confirmed(name):
    case = {"regular-languages": {"language": "(aa)*"}, "forecasting": {"horizon": 48}}
    other = case.get(name, {"share": 1.0} if name in ("calibrate", "defect") else {"steps": 7})
    lost = [fake_runs(name, arm, [s + (arm == "rsa") for s in PLAIN], **other) for arm in ("plain", "rsa")]
    without = [fake_runs(name, NO_RECURRENCE, PLAIN, **more) for more in ({}, other)]
    assert verdict(name, (0.5, 0.56, 0.6), *lost, *without) == "not confirmed"


@pytest.mark.parametrize("name", CASES)
def test_learning_rates_are_chosen_by_validation(name):
    # At the other rate the plain model is better on the test data, which must not decide.
    tempting = fake_runs(name, "plain", (0.1, 0.1, 0.1), validations=(2.0, 2.0, 2.0), rate=1e-2)
    without = fake_runs(name, NO_RECURRENCE, PLAIN)
    assert verdict(name, (0.5, 0.56, 0.6), tempting, without) == "confirmed"
    chosen = fake_runs(name, "plain", (0.1, 0.1, 0.1), validations=(0.9, 0.9, 0.9), rate=1e-2)
    assert verdict(name, (0.5, 0.56, 0.6), chosen, without) == "not confirmed"
