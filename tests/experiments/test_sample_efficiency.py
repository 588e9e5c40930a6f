"""The experiment `sample-efficiency`: learning curves, ratios of tokens and the verdict."""

import math
from dataclasses import replace

import pytest

from experiment_runs import conclude, fake_runs, finished, zero_rems
from experiments.byte_models import Curve
from experiments.sample_efficiency import EXPERIMENT, RATIO, TIME


def test_a_curve_gives_tokens_until_a_score():
    curve = Curve([100.0, 200.0, 300.0], [4.0, 3.0, 3.5])
    assert [curve.tokens_until(score) for score in (5.0, 3.5, 3.0, 2.9)] == [100, 150, 200, math.inf]


def runs_of(**scores):
    """Runs with these curves, one point per 10 bytes; a step takes 1.2 times as long as the plain model's."""
    runs = []
    for variant, curve in scores.items():
        [run] = fake_runs("sample-efficiency", variant.replace("_", " "), [curve[-1]])
        tokens = [10.0 * (point + 1) for point in range(len(curve))]
        runs.append(replace(run, values={**run.values, "tokens": tokens, "bits per byte": list(curve)}))
        runs[-1].values[TIME] = 1.2
    return runs


def test_ratios_of_tokens_and_time():
    rows = EXPERIMENT.summarise(runs_of(plain=(6, 5, 4, 3.0), rsa=(5.5, 3.5, 3.0, 2.0), alibi=(6, 5, 4, 3.5)))
    assert rows.mean(RATIO, arm="rsa") == pytest.approx(30 / 40)
    assert rows.mean("wall-clock / plain", arm="rsa") == pytest.approx(0.9)
    assert "alibi not reached with every seed" in EXPERIMENT.conclude(rows).findings[0]


@pytest.mark.parametrize("scores", [(6, 4, 3, 2.5), (6, 3, 3.5, 4.0), (3, 4, 5, 6.0)])
def test_a_variant_equal_to_the_plain_model_needs_as_many_tokens(scores):
    """Also if its curve rises, so that its final score was reached long before."""
    runs = runs_of(plain=scores, rsa=scores)
    rows = EXPERIMENT.summarise(runs)
    assert rows.mean(RATIO) == 1
    assert conclude("sample-efficiency", runs).verdict == "not confirmed"


def toy_conclusion(rate):
    wanted = {"family": "gpt2", "learning_rate": rate}
    grid = [each for each in EXPERIMENT.grid("toy", 1) if wanted.items() <= each.items()]
    grid = [each for each in grid if each["arm"] in ("plain", "rsa")]
    return conclude("sample-efficiency", [finished(settings, EXPERIMENT.measure(settings)) for settings in grid])


def test_a_rem_of_zeros_loses(monkeypatch):
    assert toy_conclusion(rate=3e-3).verdict != "not confirmed"
    zero_rems(monkeypatch)
    assert toy_conclusion(rate=3e-3).verdict == "not confirmed"
