"""Associative recall: its rows, its score, and what is concluded from steps."""

import math

import pytest
import torch

from experiment_runs import Lookup, finished
from experiments import recall
from experiments.runner.experiment import find_experiment
from experiments.variants import CONVOLUTION, DEFAULT


def test_repeated_keys_ask_for_the_values_of_their_pairs():
    tokens, labels = recall.recall_rows(30, 5, torch.Generator().manual_seed(0))
    assert tokens.shape == labels.shape == (30, 40)
    for row, asked in zip(tokens.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[:10:2], row[1:10:2], strict=True))
        assert len(pairs) == 5 and max(pairs) < recall.SYMBOLS // 2 <= min(pairs.values())
        places = [place for place, label in enumerate(asked) if label >= 0]
        assert places == [place for place in range(10, 40) if row[place] != recall.BLANK]
        assert {row[place]: asked[place] for place in places} == pairs
    assert len({tuple(row) for row in (labels >= 0).tolist()}) > 20  # at random places


def test_a_model_that_looks_keys_up_recalls_at_once_and_one_that_guesses_does_not():
    assert recall.train(Lookup(3, recall.SYMBOLS, True), 3, 200, 1e-3, seed=0) == [1.0]
    shares = recall.train(Lookup(3, recall.SYMBOLS, False), 3, 120, 1e-3, seed=0)
    assert len(shares) == 2 and max(shares) < 0.1  # after 100 steps, and at the end
    assert recall.score([0.2, 0.995], 4000) == 200 and recall.score([0.25], 4000) == 7000


def runs(arm, steps):
    settings = {"pairs": 4, "layers": 2, "width": 64, "steps": 4000, "arm": arm, "learning_rate": 1e-3}
    shares = [[1.0] if math.isfinite(n) else [0.3] for n in steps]
    values = [{recall.SHARE: s[-1], recall.STEPS: n, "shares": s} for s, n in zip(shares, steps, strict=True)]
    return [finished({**settings, "seed": seed}, each) for seed, each in enumerate(values)]


@pytest.mark.parametrize(
    ("steps", "verdict", "words"),
    [
        ([500.0, 600.0, 550.0], "confirmed", "better in 1 of 1"),
        ([900.0, 1000.0, 950.0], "not confirmed", "worse in 1"),
        ([500.0, math.inf, 550.0], "not confirmed", "better in 0 of 1"),
    ],
)
def test_recall_needs_every_seed_and_few_steps(steps, verdict, words):
    experiment = find_experiment("recall")
    rows = experiment.summarise([*runs(DEFAULT, steps), *runs(CONVOLUTION, [500.0, 600.0, 550.0])])
    conclusion = experiment.conclude(rows)
    assert conclusion.verdict == verdict and words in conclusion.sentence
