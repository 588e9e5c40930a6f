"""Finished runs with given values for tests of summaries and verdicts, broken RSA, and a model that recalls."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from experiments.runner.experiment import find_experiment
from experiments.runner.summary import Run
from experiments.variants import NO_RECURRENCE
from rsa_hf import RSAHeads

COST = {"parameters": 1.0, "time of a step / plain": 1.5}
# For each experiment that compares variants: the settings of one case, and what a run measures as a function of its
# validation score v and its test score t. Lower scores are better.
CASES = {
    "calibrate": (
        {"model": "m", "task": "c", "share": 0.1, "trained": "everything"},
        lambda v, t: {"score": t, "validation": v, "numbers": 1.0, "chosen heads": 1.0, "checked gain": 0.0},
    ),
    "forecasting": (
        {"series": "ETTh1", "horizon": 24, "family": "informer"},
        lambda v, t: {"mse": t, "mae": t / 2, "validation mse": v, "naive mse": 0.5, "naive mae": 0.4, **COST},
    ),
    "language-model": (
        {"corpus": "text8", "architecture": "transformer-xl", "model": "small", "steps": 3},
        lambda v, t: {"validation": v, "test": t, **COST},
    ),
    "regular-languages": (
        {"language": "parity"},
        lambda v, t: {"right 2–10": 1 - v / 4, "right 11–20": 1 - t / 4, "loss": 1.0, "steps": 1.0, **COST},
    ),
}
# The names of the variants "plain" and "rsa" in experiments that call them otherwise.
ARMS = {
    "calibrate": {"rsa": "calibrated", NO_RECURRENCE: "scaled heads"},
    "regular-languages": {"plain": "transformer"},
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
    """The conclusion of an experiment from lists of runs."""
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
