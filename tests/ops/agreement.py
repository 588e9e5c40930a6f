"""Inputs with every kind of head, and comparisons of values and gradients, for the tests of P V."""

import math

import torch

from references import relative_error
from rsa_hf import rem_product
from rsa_hf.ops.reference import dense_rem_product

KINDS = ("regular", "cos", "sin", "regular", "cos", "sin")
DILATION = (1, 1, 1, 2, 3, 5)


def draw(T, S=None, dtype=torch.float64, B=2, D=3):
    """V, decay and θ for `KINDS`."""
    S = T if S is None else S
    value = torch.randn(B, len(KINDS), S, D, dtype=dtype)
    # A negative λ, one within 1e-6 of 1, and pairs from fast to slow.
    decay = torch.tensor([-0.9, 0.95, 0.8, 1 - 1e-6, 0.5, 0.99], dtype=torch.float64)
    theta = torch.tensor([0.0, math.pi / 4, 0.3, 0.0, 2.0, 0.05], dtype=torch.float64)
    return [x.requires_grad_() for x in (value, decay, theta)]


def product(value, decay, theta, **masks):
    return rem_product(value, KINDS, decay, theta, DILATION, **masks)


class Product(torch.nn.Module):
    def forward(self, value, decay, theta):
        return product(value, decay, theta)


def values_and_gradients(function, tensors):
    # A reference without any lag has no graph. This gives it one through the rates, with zero gradients; V may be NaN.
    output = function(*tensors) + 0 * sum(tensor.sum() for tensor in tensors[1:])
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.shape, dtype=torch.float64, generator=generator).to(output)
    return [output, *torch.autograd.grad(output, tensors, weights, allow_unused=True, materialize_grads=True)]


def assert_close(found, expected, tolerance=1e-10):
    for name, a, b in zip(("P V", "dV", "d decay", "d theta"), found, expected, strict=True):
        assert relative_error(a, b) <= tolerance, name


def record_calls(monkeypatch, owner, *names):
    """Record the calls of an owner's functions, by name."""
    calls = []
    for name in names:
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *given, name=name, original=original, **more: calls.append(name) or original(*given, **more),
        )
    return calls


def assert_agrees(tensors, reference=dense_rem_product, dilation=DILATION, **masks):
    """Compare `rem_product` with a reference that takes the same arguments: values and gradients."""
    found, expected = (
        values_and_gradients(lambda v, r, a, product=product: product(v, KINDS, r, a, dilation, **masks), tensors)
        for product in (rem_product, reference)
    )
    assert_close(found, expected)
