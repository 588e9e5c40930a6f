"""The rule that chooses `RSAConfig.from_scratch`."""

import pytest

from experiment_runs import finished
from experiments import byte_models, defaults
from experiments.forms import FormHeads
from experiments.runner.experiment import find_experiment
from experiments.variants import CONVOLUTION, patched_modules


def rows_of(scores):
    """Rows from {arm: {task: scores by seed}}; a second learning rate is worse."""
    runs = [
        finished({"task": task, "arm": arm, "learning_rate": rate, "seed": seed}, {"score": score + 1000 * rate})
        for arm, tasks in scores.items()
        for task, of_seeds in tasks.items()
        for rate in (1e-3, 3e-3)
        for seed, score in enumerate(of_seeds)
        if rate == 1e-3 or seed == 0
    ]
    return find_experiment("defaults").summarise(runs)


SCORES = {
    "plain": {"a": [5.0, 5.0], "b": [5.0, 5.0]},
    CONVOLUTION: {"a": [3.0, 3.0], "b": [3.0, 3.0]},
    "paper": {"a": [1.0, 1.0], "b": [5.0, 5.1]},  # best on a, and worse than plain on b
    "amplitude": {"a": [2.0, 2.0], "b": [2.0, 2.0]},
    "unit lag": {"a": [0.5, 0.5]},  # has not run b
}


def test_the_best_mean_rank_of_those_that_are_nowhere_worse_than_plain_is_chosen():
    rows = rows_of(SCORES)
    assert defaults.mean_ranks(rows) == {"amplitude": 1.5, CONVOLUTION: 2.5, "paper": 2.5, "plain": 3.5}
    assert defaults.is_out(rows, "paper") == ["b"] and not defaults.is_out(rows, "amplitude")
    conclusion = defaults.conclude(rows)
    assert (conclusion.verdict, conclusion.answer) == ("chosen", "chosen: amplitude")
    assert any("worse than plain: b" in finding for finding in conclusion.findings)


@pytest.mark.parametrize(("amplitude", "answer"), [([4.0, 4.0], "chosen: amplitude"), ([6.0, 6.0], "none is chosen")])
def test_a_choice_behind_the_convolution_is_not_confirmed(amplitude, answer):
    conclusion = defaults.conclude(rows_of({**SCORES, "amplitude": {"a": amplitude, "b": amplitude}}))
    assert (conclusion.verdict, conclusion.answer) == ("not confirmed", answer)


@pytest.mark.parametrize("arm", defaults.CANDIDATES)
def test_a_candidate_is_what_it_says(arm):
    candidate = defaults.CANDIDATES[arm]
    model = defaults.add_candidate(byte_models.build("llama", byte_models.SHAPES["0.03M"]), candidate, 0.002)
    layers = [heads for _, heads in patched_modules(model)]
    assert len(layers) == (0 if candidate is None else 2)
    for heads in layers:
        R = round(4 * candidate.share)
        assert getattr(heads, "form", candidate.form) == candidate.form and len(heads.spec.layout.heads) == R
        assert isinstance(heads, FormHeads) == (candidate.form != "paper")
        assert heads.spec.layout.num_free_lags == (candidate.lags if candidate.form == "paper" else 0)
        assert len(heads.mu) == (R if candidate.gate_per_head else 1)
        assert heads.spec.layout.scale == (5 if candidate.rate == 0.01 else candidate.pace)
