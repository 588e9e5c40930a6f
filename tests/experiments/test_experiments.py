"""What all experiments have in common: grids, glossaries, repeatable runs, and the stored runs of version 0.1."""

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from experiments.runs import finished
from rsa_hf.experiments import forecasting, regular_languages, variants
from rsa_hf.experiments.byte_models import SHAPES, build
from rsa_hf.experiments.runner.experiment import EXPERIMENTS, find_experiment, run_key
from rsa_hf.experiments.runner.runner import FOLDER, read_runs, rebuild_results

RESULTS = Path(__file__).parents[2] / FOLDER
STORED = sorted(path.parent.relative_to(RESULTS) for path in RESULTS.glob("*/*/cells.jsonl"))


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("size", ["toy", "quick", "full"])
def test_grids(name, size):
    experiment = find_experiment(name)
    grid = experiment.grid(size, 2)
    assert max(Counter(run_key(settings, experiment.revision) for settings in grid).values()) == 1
    assert {int(settings["seed"]) for settings in grid} == {0, 1}
    # `--only` splits at commas.
    assert not any("," in str(settings[part]) for settings in grid for part in experiment.parts)
    assert (experiment.search_by is None) or all("learning_rate" in settings for settings in grid)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_glossaries_define_names_that_occur(name):
    experiment = find_experiment(name)
    grid = [*experiment.grid("quick", 1)]
    glossary = json.loads(json.dumps(experiment.glossary(grid), allow_nan=False))
    # A run of search-heads has all variants.
    assert glossary.keys() <= {name for settings in grid for name in settings} | {"arm"}


@pytest.mark.parametrize(
    ("name", "models", "on_gpu"),
    [
        ("sample-efficiency", {"1M", "10M", "30M"}, {"10M", "30M"}),
        ("language-model", {"small", "14 layers"}, {"14 layers"}),
    ],
)
def test_large_models_are_planned_on_every_machine(name, models, on_gpu):
    # Results of a GPU stay in the report where a CPU runs the rest.
    experiment = find_experiment(name)
    grid = experiment.grid("full", 1)
    assert {settings["model"] for settings in grid} == models
    assert {settings["model"] for settings in grid if experiment.needs_gpu(settings)} == on_gpu


FIGURES = ("mean", "low", "high", "seeds")


def read_table(folder):
    """Names and figures of table.csv."""
    with (folder / "table.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    names = [{name: value for name, value in row.items() if name not in FIGURES} for row in rows]
    return names, [float(row[name]) for row in rows for name in FIGURES]


@pytest.mark.parametrize("folder", STORED, ids=str)
def test_stored_runs_give_the_stored_figures(folder, tmp_path):
    shutil.copytree(RESULTS / folder, tmp_path / FOLDER / folder)
    (tmp_path / FOLDER / folder / "table.csv").unlink()
    rebuild_results(tmp_path)
    names, figures = read_table(tmp_path / FOLDER / folder)
    stored_names, stored_figures = read_table(RESULTS / folder)
    assert names == stored_names != []
    assert figures == pytest.approx(stored_figures, rel=1e-12, nan_ok=True)
    for name in ("conclusion.json", "configuration.json"):
        assert json.loads((tmp_path / FOLDER / folder / name).read_text()) == json.loads(
            (RESULTS / folder / name).read_text()
        )


def test_every_stored_run_is_in_the_grid_of_its_size():
    assert len(STORED) >= len(EXPERIMENTS)
    for folder in STORED:
        experiment, size = find_experiment(folder.parts[0]), folder.parts[1]
        grid = {run_key(settings, experiment.revision) for settings in experiment.grid(size, experiment.seeds[size])}
        assert read_runs(RESULTS / folder).keys() <= grid


SHORT = {
    "sample-efficiency": {"arm": "rsa", "steps": 20},
    "language-model": {"arm": "rsa", "steps": 5, "eval_bytes": 500},
    "forecasting": {"arm": "rsa", "steps": 3, "epochs": 1},
    "regular-languages": {"steps": 10},
    "synthetic": {},
    "linear-rnn": {"weights": "trained"},
}


@pytest.mark.parametrize("name", SHORT)
def test_equal_settings_give_equal_values(name):
    experiment = find_experiment(name)
    settings = {**experiment.grid("toy", 1)[0], **SHORT[name]}
    first = experiment.measure(settings)
    torch.rand(3)
    again = experiment.measure(settings)
    for measured in (first, again):
        assert measured.pop("time of a step / plain", 1.0) > 0
    assert again == first
    other = experiment.measure({**settings, "seed": 1})
    assert other.keys() <= {*first, "time of a step / plain"} and any(
        other[n] != first[n] for n in first if n in other
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: variants.make_variant("rope", build("llama", SHAPES["0.03M"]), 64),
        lambda: regular_languages.make_network("rope", 2, 16, 1),
        lambda: forecasting.make_forecaster(
            "informer", "rope", None, width=16, encoder_layers=1, decoder_layers=1, dilation=2
        ),
    ],
)
def test_an_unknown_variant_is_named(make):
    with pytest.raises(ValueError, match="variant='rope': choose from .*rsa"):
        make()


@pytest.mark.parametrize("variant", ["plain", "rsa", "mu -3 x20"])
@pytest.mark.parametrize(
    "name", ["sample-efficiency", "fine-tune", "forecasting", "language-model", "regular-languages"]
)
def test_one_variant_alone_is_no_comparison(name, variant):
    experiment = find_experiment(name)
    [*grid] = [settings for settings in experiment.grid("quick", 2) if settings["arm"] == variant]
    values = next(iter(read_runs(RESULTS / name / "quick").values())).values
    assert experiment.summarise([finished(settings, values) for settings in grid]) == []
