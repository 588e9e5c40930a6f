"""The experiment `dilation` suggests the period of a series as its dilation, and reports where there is none."""

import pytest
import torch

from experiment_runs import conclude, finished
from experiments import dilation
from experiments.dilation import EXPERIMENT
from experiments.forecasting.series import Series
from experiments.runner.runner import run_experiment
from experiments.theory import dilation as theory


@pytest.fixture
def runs(toy):
    """The toy runs of the periodic series: the whole series first, then its pieces."""
    return [run for run in toy("dilation")[0] if run.settings["source"] == "seasonal-24"]


def test_pieces_are_parts_of_the_training_data(runs):
    whole, *pieces = [run.values["autocorrelation"] for run in runs]
    assert len(pieces) == 2 and whole != pieces[0] != pieces[1]


@pytest.mark.parametrize("source", ["ETTh1", "ETTh2", "WTH"])
def test_real_series_suggest_a_day(source, data_folder, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    values = dilation.measure({"source": source, "max_lag": 250, "pieces": 1, "seed": 0})
    assert (values["suggested d"], values["as expected"]) == (24, 1.0)


def test_findings_name_the_suggested_dilation(toy):
    findings = toy("dilation")[1].findings
    assert findings[0] == "seasonal-24 suggests d = 24 (a day is 24 steps); 2 of 2 pieces suggest a day"
    assert findings[-1].startswith("the recurrence plot of python suggests d = ")


def test_the_finding_of_a_text_without_a_peak(toy, runs):
    text = next(
        run for run in toy("dilation")[0] if run.settings["source"] == "python" and run.settings["pieces"] == 1
    )

    def finding(**values):
        kept = {k: v for k, v in text.values.items() if k not in ("first zero crossing", "highest peak behind it")}
        changed = finished(text.settings, {**kept, "suggested d": 0.0, **values})
        return conclude("dilation", runs, [changed]).findings[-1]

    assert finding().endswith("no d: every diagonal is denser than chance, and none stands out")
    found = finding(**{"first zero crossing": 7.0, "highest peak behind it": 0.012})
    assert "density of chance at lag 7" in found and found.endswith("the densest is 1.2 % above chance")


def test_text8_has_27_symbols(data_folder, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    tokens = dilation._tokens("text8", 20_000)
    assert set(bytes(tokens.tolist()).decode()) <= set(" abcdefghijklmnopqrstuvwxyz") and len(tokens) > 5_000


def test_a_series_without_a_period_is_not_confirmed(tmp_path, monkeypatch):
    noise = Series(torch.randn(1000, 2), torch.zeros(1000, 4), (900, 950, 1000))
    monkeypatch.setattr(dilation, "load_series", lambda name: noise)
    found = run_experiment(EXPERIMENT, "toy", tmp_path, progress=False)
    assert found.verdict == "not confirmed"
    assert "suggests no d (a day is 24 steps); 0 of 2 pieces suggest a day" in found.findings[0]


def test_lags_that_are_off_by_one_are_not_confirmed(tmp_path, monkeypatch):
    right = theory.autocorrelation
    monkeypatch.setattr(theory, "autocorrelation", lambda *args, **keywords: right(*args, **keywords).roll(1))
    assert run_experiment(EXPERIMENT, "toy", tmp_path, progress=False).verdict == "not confirmed"


def test_one_piece_that_disagrees_is_not_confirmed(runs):
    whole, first, second = runs
    assert second.settings["seed"] == 1
    disagrees = finished(second.settings, {**second.values, "as expected": 0.0})
    conclusion = conclude("dilation", [whole, first, disagrees])
    assert conclusion.verdict == "not confirmed" and "1 of 2 pieces" in conclusion.findings[0]


def test_without_pieces_the_whole_series_can_only_refute(runs):
    whole = runs[0]
    found = conclude("dilation", [whole])
    assert found.verdict == "not measurable at this size"
    assert found.sentence.startswith("seasonal-24 suggests a day as d in 1 of 1 cases: as a whole only. ")
    wrong = finished(whole.settings, {**whole.values, "as expected": 0.0})
    assert conclude("dilation", [wrong]).verdict == "not confirmed"
