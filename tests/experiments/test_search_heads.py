"""The experiment `search-heads`: what it measures, and its verdict."""

import logging

import pytest

from experiment_runs import conclude, finished
from experiments import search_heads
from experiments.search_heads import DEFAULT, EXPERIMENT
from rsa_hf.training.search import FoundPlan

optuna = pytest.importorskip("optuna", reason="a search needs it: pip install 'rsa_hf[reproduce]'")


def test_a_run_compares_the_plan_found_with_the_default(toy, caplog, monkeypatch):
    optuna.logging.set_verbosity(optuna.logging.INFO)
    monkeypatch.setattr(logging.getLogger("optuna"), "propagate", True)
    [run], _ = toy("search-heads", seeds=1)
    # optuna logs nothing during the experiment, and its verbosity is restored afterwards.
    assert not [record for record in caplog.records if record.name.startswith("optuna")]
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    values = run.values
    assert len(values["validation"]) == 3
    heads = values["regular"] + 2 * values["cyclical pairs"] + values["dilated regular"]
    assert 1 <= heads + 2 * values["dilated cyclical pairs"] <= 4
    assert values["found − default"] == values["test, found"] - values["test, default"]
    assert values["test, plain"] != values["test, default"]


def test_a_search_that_finds_nothing_is_not_confirmed(monkeypatch):
    monkeypatch.setattr(search_heads, "search", lambda *_, **__: [FoundPlan(0, 3.0, DEFAULT)])
    settings = {**EXPERIMENT.grid("toy", 1)[0], "steps": 3}
    runs = [finished({**settings, "seed": seed}, EXPERIMENT.measure(settings)) for seed in (0, 1)]
    conclusion = conclude("search-heads", runs)
    assert conclusion.verdict == "not confirmed" and "+0.000" in conclusion.sentence


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((-0.1, -0.11, -0.12), "confirmed"),
        ((-0.1, 0.05, -0.02), "not measurable at this size"),
        ((0.1, 0.09, 0.1), "not confirmed"),
    ],
)
def test_the_verdict_follows_from_the_differences(differences, verdict):
    runs = [
        finished(settings, {"test, plain": 3, "test, default": 2, "test, found": 2 + d, "found − default": d})
        for settings, d in zip(EXPERIMENT.grid("quick", 3), differences, strict=True)
    ]
    assert conclude("search-heads", runs).verdict == verdict
