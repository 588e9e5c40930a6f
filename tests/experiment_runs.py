"""Finished runs with given values for tests of summaries and verdicts, broken RSA, and a model that recalls."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from experiments.defect import SCORES
from experiments.runner.experiment import find_experiment
from experiments.runner.summary import Run
from experiments.variants import CONVOLUTION, DEFAULT, NO_RECURRENCE
from rsa_hf import RSAHeads

COST = {"parameters": 1.0, "time of a step / plain": 1.5}
BYTES = {"model": "gpt2 of 1M", "text": "enwik8", "steps": 400}


def in_two_parts(v, t):
    return {"validation": v, "test": t, "test by part": [t - 0.1, t + 0.1], **COST}


# For each experiment that compares variants: the settings of one case, and what a run measures as a function of its
# validation score v and its test score t. Lower scores are better.
CASES = {
    "calibrate": (
        {"model": "m", "task": "c", "share": 0.1, "trained": "everything"},
        lambda v, t: {"score": t, "validation": v, "numbers": 1.0, "chosen heads": 1.0, "checked gain": 0.0},
    ),
    "confirmation": (BYTES, in_two_parts),
    "defect": (
        {"encoder": "full", "task": "devign", "share": 0.1, "epochs": 4},
        lambda v, t: {"validation": 1 - v / 4, **dict.fromkeys(SCORES, 1 - t / 4), "right": [1.0]},
    ),
    "forecasting": (
        {"series": "ETTh1", "horizon": 24, "family": "informer"},
        lambda v, t: {"mse": t, "validation mse": v, "naive mse": 0.5, **COST},
    ),
    "language-model": (
        {"corpus": "text8", "architecture": "transformer-xl", "model": "small", "steps": 3},
        lambda v, t: {"validation": v, "test": t, **COST},
    ),
    "regular-languages": (
        {"language": "parity"},
        lambda v, t: (
            {"right 2–10": 1 - v / 4, "right 11–20": 1 - 0.2 * t, "right 21–30": 1 - 0.3 * t}
            | {"loss": 1.0, "steps": 1.0, **COST}
        ),
    ),
    "rivals": (BYTES, in_two_parts),
}
# The names of the variants "plain", "rsa" and "no recurrence" in experiments that call them otherwise, or that compare
# with a short memory in place of the last one.
OTHER_MEMORY = {"rsa": DEFAULT, NO_RECURRENCE: CONVOLUTION}
ARMS = {
    "calibrate": {"rsa": "calibrated", NO_RECURRENCE: "scaled heads"},
    "confirmation": OTHER_MEMORY,
    "defect": {"rsa": DEFAULT},
    "regular-languages": {"plain": "transformer"},
    "rivals": OTHER_MEMORY,
}


def finished(settings, values):
    return Run(settings, values, 1.0, "a machine", {})


def fake_runs(name, arm, tests, validations=None, rate=1e-3, **settings):
    """Finished runs of a variant with these scores, one per seed."""
    shared, values = CASES[name]
    shared = {**shared, "arm": ARMS.get(name, {}).get(arm, arm), "learning_rate": rate, **settings}
    pairs = zip(tests if validations is None else validations, tests, strict=True)
    return [finished({**shared, "seed": seed}, values(*pair)) for seed, pair in enumerate(pairs)]


def conclude(name, *runs):
    experiment = find_experiment(name)
    return experiment.conclude(experiment.summarise([run for each in runs for run in each]))


def measure_again(experiment, runs, **settings):
    """The same runs, with new values for those that have these settings."""
    return [
        replace(run, values=experiment.measure(run.settings)) if settings.items() <= run.settings.items() else run
        for run in runs
    ]


def zero_rems(monkeypatch):
    """Break RSA: P V of every head is 0."""
    forward = RSAHeads.forward
    monkeypatch.setattr(RSAHeads, "forward", lambda self, a, value, mask: forward(self, a, 0 * value, mask))


class Lookup(nn.Module):
    """Names the value of a key, of those pairs that a row begins with, or always the same symbol."""

    def __init__(self, pairs, symbols, knows):
        super().__init__()
        self.pairs, self.symbols, self.knows = pairs, symbols, knows
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, **_):
        logits = torch.zeros(*input_ids.shape, self.symbols)
        for row, tokens in enumerate(input_ids.tolist()):
            known = tokens[: 2 * self.pairs] if self.knows else []
            values = dict(zip(known[::2], known[1::2], strict=True))
            for place, token in enumerate(tokens):
                logits[row, place, values.get(token, self.symbols - 1)] = 9.0
        return SimpleNamespace(logits=logits + self.weight, loss=self.weight)
