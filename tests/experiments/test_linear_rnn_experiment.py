"""The experiment `linear-rnn` fails with a broken REM."""

import pytest
import torch

from experiments.linear_rnn import EXPERIMENT
from experiments.runner.runner import run_experiment
from experiments.theory import linear_rnn as theory
from rsa_hf.ops import rem_product


def zeroed(value, *plan):
    return torch.zeros_like(rem_product(value, *plan))


def shifted(value, *plan):
    return rem_product(value, *plan).roll(1, dims=2)


def undilated(value, kinds, decay, theta, dilation):
    return rem_product(value, kinds, decay, theta, 1)


def frozen(value, kinds, decay, theta, dilation):
    return rem_product(value, kinds, torch.full_like(decay, 0.5), theta, dilation)


@pytest.mark.parametrize("broken", [zeroed, shifted, undilated, frozen])
def test_a_broken_rem_is_not_confirmed(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(theory, "rem_product", broken)
    assert run_experiment(EXPERIMENT, "toy", tmp_path, progress=False).verdict == "not confirmed"


def test_accepting_ill_conditioned_weights_is_not_confirmed(tmp_path, monkeypatch):
    monkeypatch.setattr(theory, "WORST_CONDITION", float("inf"))
    conclusion = run_experiment(EXPERIMENT, "toy", tmp_path, progress=False)
    assert conclusion.verdict == "not confirmed" and "2 of 4" in conclusion.sentence
