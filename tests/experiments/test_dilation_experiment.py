"""The experiment `dilation`: it finds the period of a series that has one, and says so where it does not."""

import pytest
import torch

from experiments.runs import conclude, finished
from rsa_hf.experiments import dilation
from rsa_hf.experiments.dilation import EXPERIMENT
from rsa_hf.experiments.forecasting.series import Series
from rsa_hf.experiments.runner.runner import read_runs, run_experiment
from rsa_hf.experiments.theory import dilation as theory


def test_pieces_are_parts_of_the_training_data(toy):
    found = [result for result in read_runs(toy("dilation")[0]).values() if result.settings["source"] == "seasonal-24"]
    whole, *pieces = [result.values["autocorrelation"] for result in found]
    assert len(pieces) == 2 and whole != pieces[0] != pieces[1]


@pytest.mark.parametrize(("source", "period"), [("ETTh1", 24), ("ETTh2", 24), ("WTH", 24)])
def test_real_series_suggest_a_day(source, period, data_folder, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    values = dilation.measure({"source": source, "max_lag": 250, "pieces": 1, "seed": 0})
    assert (values["suggested d"], values["as expected"]) == (period, 1.0)


def test_findings(toy):
    findings = toy("dilation")[1].findings
    assert findings[0] == "seasonal-24 suggests d = 24 (a day is 24 steps); 2 of 2 pieces suggest a day"
    assert findings[-1].startswith("the recurrence plot of python suggests d = ")


def test_a_text_that_never_falls_to_chance_says_so(toy):
    text = next(
        r
        for r in read_runs(toy("dilation")[0]).values()
        if r.settings["source"] == "python" and r.settings["pieces"] == 1
    )
    series = [r for r in read_runs(toy("dilation")[0]).values() if r.settings["source"] != "python"]

    def said(**values):
        kept = {k: v for k, v in text.values.items() if k not in ("first zero crossing", "highest peak behind it")}
        changed = finished(text.settings, {**kept, "suggested d": 0.0, **values})
        return conclude("dilation", series, [changed]).findings[-1]

    assert said().endswith("no d: every diagonal is denser than chance, and none stands out")
    assert "density of chance at lag 7" in (
        words := said(**{"first zero crossing": 7.0, "highest peak behind it": 0.012})
    )
    assert words.endswith("the densest is 1.2 % above chance")


def test_text8_is_of_27_symbols(data_folder, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    tokens = dilation._tokens("text8", 20_000)
    assert set(bytes(tokens.tolist()).decode()) <= set(" abcdefghijklmnopqrstuvwxyz") and len(tokens) > 5_000


def noise():
    return Series(torch.randn(1000, 2), torch.zeros(1000, 4), (900, 950, 1000))


def test_a_series_without_a_period_is_not_confirmed(tmp_path, monkeypatch):
    monkeypatch.setattr(dilation, "load_series", lambda name: noise())
    found = run_experiment(EXPERIMENT, "toy", tmp_path, progress=False)
    assert found.verdict == "not confirmed"
    assert "suggests no d (a day is 24 steps); 0 of 2 pieces suggest a day" in found.findings[0]


def test_lags_that_are_off_by_one_are_not_confirmed(tmp_path, monkeypatch):
    right = theory.autocorrelation
    monkeypatch.setattr(theory, "autocorrelation", lambda *args, **keywords: right(*args, **keywords).roll(1))
    assert run_experiment(EXPERIMENT, "toy", tmp_path, progress=False).verdict == "not confirmed"


def test_one_piece_that_disagrees_is_not_confirmed(toy):
    found = [run for run in read_runs(toy("dilation")[0]).values() if run.settings["source"] == "seasonal-24"]
    whole, first, second = found
    assert second.settings["seed"] == 1
    disagrees = finished(second.settings, {**second.values, "as expected": 0.0})
    conclusion = conclude("dilation", [whole, first, disagrees])
    assert conclusion.verdict == "not confirmed" and "1 of 2 pieces" in conclusion.findings[0]


def test_without_pieces_nothing_is_said_of_them(toy):
    whole = [
        r
        for r in read_runs(toy("dilation")[0]).values()
        if r.settings["source"] == "seasonal-24" and r.settings["pieces"] == 1
    ]
    found = conclude("dilation", whole)
    assert found.verdict == "not measurable at this size"
    assert found.sentence.startswith("seasonal-24 suggests a day as d in 1 of 1 cases: as a whole only. ")
    wrong = [finished(result.settings, {**result.values, "as expected": 0.0}) for result in whole]
    assert conclude("dilation", wrong).verdict == "not confirmed"
