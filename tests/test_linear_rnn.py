"""Propositions 1, 2 and 4: a linear RNN and its heads, without a softmax half, have the same hidden states.

The hidden states of h_t = W_h h_{t−d} + W_x x_t are h_t = W_x x_t + Σ_j W_hʲ W_x x_{t−jd}. With W_h = B diag(z) B⁻¹,
W_hʲ = Σ_k z_kʲ M_k where M_k = b_k c_kᵀ of the columns of B and the rows of B⁻¹. A real z is a regular head whose value
matrix is M W_x; of a pair of complex z, the cos head has 2 Re(M) W_x and the sin head −2 Im(M) W_x.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rsa_hf import rem_product

INPUTS = 3


def linear_rnn(x, W_h, W_x, dilation):
    """The hidden states [B, T, n], step by step."""
    states = []
    for t, written in enumerate((x @ W_x.T).unbind(1)):
        states.append(written if t < dilation else written + states[t - dilation] @ W_h.T)
    return torch.stack(states, dim=1)


def heads_of(W_h):
    """Kinds, decays, angles and projectors [K, n, n] of the heads of W_h, whose eigenvalues are distinct."""
    z, B = torch.linalg.eig(W_h)
    M = torch.einsum("ik,kj->kij", B, torch.linalg.inv(B))
    real, upper = z.imag == 0, z.imag > 0
    kinds = ["regular"] * int(real.sum()) + ["cos"] * int(upper.sum()) + ["sin"] * int(upper.sum())
    decay = torch.cat([z[real].real, z[upper].abs(), z[upper].abs()])
    theta = torch.cat([torch.zeros_like(z[real].real), z[upper].angle(), z[upper].angle()])
    return kinds, decay, theta, torch.cat([M[real].real, 2 * M[upper].real, -2 * M[upper].imag])


def hidden_states(x, W_h, W_x, dilation, product=rem_product):
    """The same from the heads: one more, whose P is the identity, gives W_x x_t."""
    kinds, decay, theta, projectors = heads_of(W_h)
    own = x @ W_x.T
    value = torch.einsum("btm,knm->bktn", x, projectors @ W_x)
    return own + product(value, kinds, decay, theta, dilation).sum(1)


def draw(n, radius, seed, length):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, n), (n, INPUTS), (2, length, INPUTS))
    W_h, W_x, x = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return W_h * radius / float(torch.linalg.eigvals(W_h).abs().max()), W_x, x


def error(W_h, W_x, x, dilation, **options):
    expected = linear_rnn(x, W_h, W_x, dilation)
    return float((hidden_states(x, W_h, W_x, dilation, **options) - expected).abs().max() / expected.abs().max())


@given(
    n=st.integers(1, 12),
    radius=st.floats(0.05, 0.99),
    dilation=st.integers(1, 5),
    length=st.integers(1, 40),
    seed=st.integers(0, 10_000),
)
def test_a_linear_rnn_equals_its_heads(n, radius, dilation, length, seed):
    W_h, W_x, x = draw(n, radius, seed, length)
    assume(float(torch.linalg.cond(torch.linalg.eig(W_h).eigenvectors)) < 1e5)  # else a draw that is nearly defective
    assert error(W_h, W_x, x, dilation) < 1e-9


@pytest.mark.parametrize(
    "broken",
    [
        lambda value, *heads: rem_product(value, *heads).roll(1, dims=2),  # one step late
        lambda value, *heads: rem_product(value, *heads[:3], 1),  # undilated
        lambda value, kinds, decay, *more: rem_product(value, kinds, 0.99 * decay, *more),  # forgets 1 % faster
    ],
)
def test_a_broken_rem_is_caught(broken):
    assert error(*draw(8, 0.95, 1, 60), 2, product=broken) > 1e-4
