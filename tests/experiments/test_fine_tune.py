"""The experiment `fine-tune`: its variants, its choice of a step by validation, and its verdict."""

import argparse
import math

import torch
from torch import nn

from experiments.corpora import portion
from experiments.fine_tune import fine_tune
from experiments.pretrained_tasks import Task


def test_a_portion_has_whole_lines_and_the_size_asked_for():
    text = "".join(f"line {i} é\n" for i in range(1000)).encode()
    assert portion(text, 1.0, 3) == text
    pieces = {portion(text, 0.1, seed) for seed in range(20)}
    assert len(pieces) > 15
    for piece in pieces:
        assert b"\n" + piece in b"\n" + text and piece.endswith(b"\n")
        assert 0.1 * len(text) - 30 < len(piece) <= 0.1 * len(text)
    assert len(portion(b"x" * 1000, 0.1, 0)) == 100  # a text of one line is cut inside the line


class Counter(nn.Module):
    """A model whose only weight rises by about the learning rate in each step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return argparse.Namespace(loss=-(self.weight * x).sum())


def scripted(validation, test):
    """A task that returns the given validation scores one after the other."""
    scores = iter(validation)
    rows = [{"x": torch.ones(1)} for _ in range(5)]

    def score(model, split):
        return test(float(model.weight.detach())) if split == "test" else next(scores)

    return Task("loss", rows, torch.utils.data.default_collate, score)


def test_the_test_score_is_that_of_the_step_with_the_best_validation_score():
    model, plan = Counter(), {"learning_rate": 0.1, "batch": 2, "seed": 0}
    task = scripted([3.0, 2.0, 1.0, 1.5, 4.0], lambda weight: -weight)
    values = fine_tune(model, task, **plan, steps=8, evaluations=4)
    assert (values["best step"], values["validation"], values["before training"]) == (4, 1.0, 0.0)
    assert 0 > values["loss"] > -float(model.weight.detach())  # training went on after the best step
    diverges = scripted([3.0, 2.0, math.nan], lambda weight: -weight)
    assert fine_tune(Counter(), diverges, **plan, steps=4, evaluations=2)["best step"] == 2
    never = scripted([1.0, 2.0, 2.0], lambda weight: weight)
    values = fine_tune(Counter(), never, **plan, steps=4, evaluations=2)
    assert (values["best step"], values["loss"]) == (0, 0.0)
