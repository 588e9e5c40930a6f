"""P V of REMs with any amplitude, f(τ) = Re(c z^{τ/d − 1}), on every backend, held to two nested loops."""

import functools
import math

import pytest
import torch

from ops.agreement import values_and_gradients
from ops.mixed_product import device
from references import double_loop, relative_error
from rsa_hf import rem_matrix, rem_product

DILATION = (1, 1, 1, 3, 2, 1)
# A head that is off, two that pass on the last token alone, a rate near 1, angles of 0 and π.
DECAY = (0.7, 0.0, -0.9, 0.5, 1 - 1e-6, 0.8)
THETA = (0.3, 1.0, 0.0, 2.0, math.pi, 0.0)
AMPLITUDE = ((0.0, 0.0), (1.0, 0.5), (-2.0, 0.0), (0.3, -1.0), (1.0, 0.2), (0.0, 1.0))


def draw(S, dtype):
    value = torch.randn(2, len(DECAY), S, 3, dtype=dtype, device=device())
    rates = (torch.tensor(each, dtype=torch.float64, device=device()) for each in (DECAY, THETA, AMPLITUDE))
    return [tensor.requires_grad_() for tensor in (value, *rates)]


def weight(c, rate, angle, lag):
    """f at a step of one head; its amplitude c stands in place of a kind."""
    turn = (lag - 1) * angle
    return (rate ** (lag - 1) if lag > 1 else 1) * (c[0] * torch.cos(turn) - c[1] * torch.sin(turn))


def one_step_late(c, rate, angle, lag):
    return weight(c, rate, angle, lag + 1)


def conjugate(c, rate, angle, lag):
    return weight((c[0], -c[1]), rate, angle, lag)


def backwards(c, rate, angle, lag):
    return weight(c, rate, angle, 5 - lag) if lag < 5 else 0 * rate


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S", "window"), [(37, 37, None), (21, 40, None), (35, 35, 9)])
def test_any_amplitude_agrees_with_nested_loops(backend, causal, T, S, window):
    tensors, offset = draw(S, torch.float32 if backend == "triton" else torch.float64), S - T
    visible = (offset + torch.arange(T)[:, None] - torch.arange(S)).abs() < (window or S)
    visible = visible.expand(2, 1, T, S)

    def product(value, decay, theta, amplitude):
        masks = {"query_length": T, "causal": causal, "sliding_window": window}
        return rem_product(value, "cos", decay, theta, DILATION, **masks, amplitude=amplitude)

    def loops(weight, value, decay, theta, amplitude):
        return double_loop(value, [*amplitude], decay, theta, DILATION, T, offset, causal, visible, weight)

    found = [each.cpu() for each in values_and_gradients(product, tensors)]
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    names = ("P V", "dV", "d decay", "d theta", "d amplitude")
    expected = values_and_gradients(functools.partial(loops, weight), exact)
    errors = {name: relative_error(*pair) for name, *pair in zip(names, found, expected, strict=True)}
    assert max(errors.values()) < (1e-4 if backend == "triton" else 1e-9), errors
    value, decay, theta, amplitude = exact
    P = rem_matrix("cos", decay, theta, DILATION, query_length=T, key_length=S, causal=causal, amplitude=amplitude)
    assert relative_error(torch.where(visible, P, 0) @ value, expected[0]) < 1e-9
    for broken in (one_step_late, conjugate, backwards):
        wrong = loops(broken, *exact)
        assert relative_error(found[0], wrong) > 1e-2, broken.__name__
