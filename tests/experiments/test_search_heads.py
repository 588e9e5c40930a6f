"""The experiment `search-heads`: what it measures, and its verdict."""

import pytest

from experiment_runs import conclude, finished
from experiments import search_heads
from experiments.search_heads import DEFAULT, EXPERIMENT

pytest.importorskip("optuna", reason="a search needs it: pip install 'rsa_hf[reproduce]'")


def test_a_run_compares_the_plan_found_with_the_default(toy):
    [run], _ = toy("search-heads", seeds=1)
    values = run.values
    assert len(values["validation"]) == 3
    heads = values["regular"] + 2 * values["cyclical pairs"] + values["dilated regular"]
    assert 1 <= heads + 2 * values["dilated cyclical pairs"] <= 4
    assert values["found − default"] == values["test, found"] - values["test, default"]
    assert values["test, plain"] != values["test, default"]


def test_a_search_that_finds_nothing_is_not_confirmed(monkeypatch):
    monkeypatch.setattr(search_heads, "draw_plan", lambda *_: DEFAULT)
    settings = {**EXPERIMENT.grid("toy", 1)[0], "steps": 3, "trials": 1}
    runs = [finished({**settings, "seed": seed}, EXPERIMENT.measure(settings)) for seed in (0, 1)]
    conclusion = conclude("search-heads", runs)
    assert conclusion.verdict == "not confirmed" and "+0.000" in conclusion.sentence
