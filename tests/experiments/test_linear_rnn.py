"""Propositions 1, 2 and 4: a linear RNN and its heads have the same hidden states; with a broken REM they do not."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments import linear_rnn as experiment
from experiments.linear_rnn import EXPERIMENT, linear_rnn, linear_rnn_to_heads
from experiments.runner.runner import run_experiment
from rsa_hf import rem_product

EXACT = 1e-9


def draw(n, radius, seed=0, m=5):
    generator = torch.Generator().manual_seed(seed)
    W_h = torch.randn(n, n, dtype=torch.float64, generator=generator)
    W_h = W_h * radius / float(torch.linalg.eigvals(W_h).abs().max())
    return W_h, torch.randn(n, m, dtype=torch.float64, generator=generator)


def worst(found, W_h, W_x, dilation=1, length=200):
    x = torch.randn(2, length, W_x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = linear_rnn(x, W_h, W_x, dilation)
    return float((found.hidden_states(x) - expected).abs().max() / expected.abs().max())


@given(
    n=st.integers(1, 12),
    radius=st.floats(0.05, 0.99),
    dilation=st.integers(1, 5),
    length=st.integers(1, 40),
    seed=st.integers(0, 10_000),
)
def test_any_size_length_and_dilation(n, radius, dilation, length, seed):
    W_h, W_x = draw(n, radius, seed, m=1 + seed % 4)
    assume(float(torch.linalg.cond(torch.linalg.eig(W_h).eigenvectors)) < 1e5)  # else a draw that is nearly defective
    heads = linear_rnn_to_heads(W_h, W_x, dilation)
    assert worst(heads, W_h, W_x, dilation, length) < EXACT


def test_a_known_spectrum():
    angle, gamma = 0.7, 0.8
    turn = gamma * torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    W_h = torch.block_diag(turn, torch.tensor([[-0.5]]), torch.zeros(1, 1)).double()
    heads = linear_rnn_to_heads(W_h, torch.eye(4), dilation=3)
    assert heads.kinds == ("regular", "cos", "sin")  # the eigenvalue 0 needs none
    torch.testing.assert_close(heads.decay, torch.tensor([-0.5, gamma, gamma], dtype=torch.float64))
    torch.testing.assert_close(heads.theta, torch.tensor([0, angle, angle], dtype=torch.float64))
    assert worst(heads, W_h, torch.eye(4).double(), 3) < EXACT
    # Controls: another dilation, and another spectrum, are something else.
    assert worst(heads, W_h, torch.eye(4).double(), 2) > 1e-2
    assert worst(heads, 0.98 * W_h, torch.eye(4).double(), 3) > 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_equal_eigenvalues_share_a_head_in_any_basis(seed):
    # To rounding a real eigenvalue that is there twice is now two real ones, now a pair such as 0.7 ± 1e-15 i.
    basis, W_x = torch.linalg.qr(draw(6, 1.0, seed)[0])[0] + 0.3 * draw(6, 1.0, 50 + seed)[0], draw(6, 1.0, seed)[1]
    spectrum = torch.tensor([0.7, 0.7, 0.7, -0.4, -0.4, 0.2], dtype=torch.float64)
    W_h = basis * spectrum @ torch.linalg.inv(basis)
    heads = linear_rnn_to_heads(W_h, W_x)
    assert heads.kinds == ("regular",) * 3
    torch.testing.assert_close(heads.decay, torch.tensor([0.7, -0.4, 0.2], dtype=torch.float64))
    assert worst(heads, W_h, W_x) < EXACT


@pytest.mark.parametrize(
    ("W_h", "message"),
    [
        (torch.tensor([[0.5, 1.0], [0.0, 0.5]]), "no usable basis of eigenvectors"),
        (torch.tensor([[1.0, 0.0], [0.0, 0.5]]), "eigenvalue of modulus 1:"),
        (torch.tensor([[0.0, -1.5], [1.5, 0.0]]), "eigenvalue of modulus 1.5"),
    ],
)
def test_what_no_head_can_do_is_refused(W_h, message):
    with pytest.raises(ValueError, match=message):
        linear_rnn_to_heads(W_h, torch.eye(2))


def shifted(value, *plan):
    return rem_product(value, *plan).roll(1, dims=2)


def undilated(value, kinds, decay, theta, dilation):
    return rem_product(value, kinds, decay, theta, 1)


@pytest.mark.parametrize("broken", [shifted, undilated])
def test_a_broken_rem_is_not_confirmed(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "rem_product", broken)
    assert run_experiment(EXPERIMENT, "toy", tmp_path, progress=False).verdict == "not confirmed"


def test_accepting_ill_conditioned_weights_is_not_confirmed(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "WORST_CONDITION", float("inf"))
    conclusion = run_experiment(EXPERIMENT, "toy", tmp_path, progress=False)
    assert conclusion.verdict == "not confirmed" and "2 of 4" in conclusion.sentence
