"""Propositions 1, 2 and 4: a linear RNN and its heads have the same hidden states."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments.theory.linear_rnn import init_from_linear_rnn, linear_rnn, linear_rnn_to_heads
from rsa_hf.config import RSAConfig
from rsa_hf.heads import RSAHeads

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


@pytest.mark.parametrize("dilation", [1, 2, 7])
@pytest.mark.parametrize("radius", [0.3, 0.9, 0.999])
def test_a_random_rnn_is_its_heads(radius, dilation):
    W_h, W_x = draw(16, radius)
    heads = linear_rnn_to_heads(W_h, W_x, dilation)
    assert len(heads.kinds) == 16  # r + 2s, every eigenvalue being distinct and nonzero
    assert worst(heads, W_h, W_x, dilation) < EXACT
    # Controls: another dilation, and another spectrum, are something else.
    assert worst(heads, W_h, W_x, dilation + 1) > 1e-2
    assert worst(heads, 0.98 * W_h, W_x, dilation) > 1e-4


def test_inputs_and_weights_in_float32():
    W_h, W_x = (weights.float() for weights in draw(8, 0.9))
    x = torch.randn(2, 30, 5)
    found = linear_rnn_to_heads(W_h, W_x).hidden_states(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), linear_rnn(x, W_h, W_x), rtol=1e-4, atol=1e-4)


def test_a_trained_rnn_is_its_heads():
    torch.manual_seed(0)
    W_h, W_x = (tensor.requires_grad_() for tensor in draw(16, 0.5))
    readout = torch.randn(16, 5, dtype=torch.float64) / 4
    optimizer = torch.optim.Adam([W_h, W_x], lr=0.01)
    losses = []
    for _ in range(30):
        x = torch.randn(8, 40, 5, dtype=torch.float64)
        # To say again what was seen three steps ago.
        loss = (linear_rnn(x, W_h, W_x)[:, 3:] @ readout - x[:, :-3]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    W_h, W_x = W_h.detach(), W_x.detach()
    assert worst(linear_rnn_to_heads(W_h, W_x), W_h, W_x) < EXACT


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
    plan = RSAConfig(**heads.head_counts()).layer_plans([4])[0]
    assert (plan.kinds, plan.dilations) == (heads.kinds, (3, 3, 3))
    assert worst(heads, W_h, torch.eye(4).double(), 3) < EXACT


def test_equal_eigenvalues_share_a_head():
    W_h = 0.5 * torch.eye(3, dtype=torch.float64)
    heads = linear_rnn_to_heads(W_h, torch.eye(3))
    assert heads.kinds == ("regular",)
    assert worst(heads, W_h, torch.eye(3).double()) < EXACT


@pytest.mark.parametrize("seed", range(8))
def test_equal_eigenvalues_share_a_head_in_any_basis(seed):
    # To rounding a real eigenvalue that is there twice is now two real ones, now a pair such as 0.7 ± 1e-15 i.
    basis, W_x = torch.linalg.qr(draw(6, 1.0, seed)[0])[0] + 0.3 * draw(6, 1.0, 50 + seed)[0], draw(6, 1.0, seed)[1]
    spectrum = torch.tensor([0.7, 0.7, 0.7, -0.4, -0.4, 0.2], dtype=torch.float64)
    W_h = basis * spectrum @ torch.linalg.inv(basis)
    heads = linear_rnn_to_heads(W_h, W_x)
    assert heads.kinds == ("regular",) * 3
    torch.testing.assert_close(heads.decay, torch.tensor([0.7, -0.4, 0.2], dtype=torch.float64))
    assert worst(heads, W_h, W_x) < EXACT


def test_no_memory_at_all():
    W_h = torch.zeros(3, 3, dtype=torch.float64)
    heads = linear_rnn_to_heads(W_h, torch.eye(3))
    assert heads.kinds == ()
    assert worst(heads, W_h, torch.eye(3).double()) == 0


@pytest.mark.parametrize(
    ("W_h", "message"),
    [
        (torch.tensor([[0.5, 1.0], [0.0, 0.5]]), "no usable basis of eigenvectors.*defective"),
        (torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "no usable basis of eigenvectors.*defective"),
        (torch.tensor([[1.0, 0.0], [0.0, 0.5]]), "eigenvalue of modulus 1:.*Scale W_h down"),
        (torch.tensor([[0.0, -1.5], [1.5, 0.0]]), "eigenvalue of modulus 1.5"),
    ],
)
def test_what_no_head_can_do_is_refused(W_h, message):
    with pytest.raises(ValueError, match=message):
        linear_rnn_to_heads(W_h, torch.eye(2))


def spectrum():
    angle, gamma = 0.7, 0.8
    turn = gamma * torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    return torch.block_diag(turn, torch.diag(torch.tensor([-0.6, 0.3])))


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_rates_start_from_a_spectrum(scale):
    config = RSAConfig(
        num_regular=1,
        num_cyclical_pairs=2,
        num_dilated_regular=3,
        num_dilated_cyclical_pairs=1,
        dilation=[2, 3, 4, 5, 6],
        parameter_scale=scale,
    )
    heads = RSAHeads(config.layer_plans([16])[0])
    before = {name: value.detach().clone() for name, value in heads.rates().items()}
    init_from_linear_rnn(heads, spectrum())
    init_from_linear_rnn(heads, spectrum(), dilated=True)
    after = heads.rates()
    # One regular head takes the slower of two real eigenvalues; three dilated ones take both, and one stays.
    expected = torch.tensor([-0.6, -0.6, 0.3, float(before["lam"][3])])
    torch.testing.assert_close(after["lam"], expected, rtol=1e-5, atol=1e-6)
    changed = [0, 2]  # the first undilated pair, and the dilated one
    for name, value in (("gamma", 0.8), ("theta", 0.7)):
        expected = before[name].clone()
        expected[changed] = value
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(after["gate"], before["gate"])


def test_a_layer_without_such_heads():
    heads = RSAHeads(RSAConfig(num_regular=2).layer_plans([4])[0])
    with pytest.raises(ValueError, match="no dilated RSA heads"):
        init_from_linear_rnn(heads, spectrum(), dilated=True)
