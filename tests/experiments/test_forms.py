"""Memories that rsa_hf does not have, held to a loop written out."""

import cmath

import pytest
import torch

from experiments.byte_models import SHAPES, build
from experiments.forms import FORMS, FormHeads
from experiments.variants import patched_modules
from rsa_hf import RSAConfig, patch_model
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import rems_and_gate

T, MEMORY, LAGS = 7, 5, 3


def heads():
    torch.manual_seed(0)
    config = RSAConfig(num_regular=1, num_cyclical_pairs=1, nu_init=0.3, theta_init=0.9, gate_init=0.4)
    model = patch_model(build("llama", SHAPES["0.03M"]), config)
    return next(patched_modules(model))[1]


def f(heads, h, lag):
    """The weight of a lag ≥ 1 in head h, in Python's own complex numbers."""
    if heads.form in ("kernel", "nothing"):
        return float(heads.kernel[h, lag - 1]) if heads.form == "kernel" and lag <= LAGS else 0.0
    rems, _ = rems_and_gate(heads.learned, heads.spec.layout, 1)
    z = cmath.rect(*(float(rate[h]) for rate in (rems.decay, rems.theta)))
    unit = -1j if rems.kinds[h] == "sin" else 1
    c = unit if heads.form == "unit lag" else complex(*heads.amplitude[h].tolist())
    return (c * z ** (lag - 1)).real


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_form_is_its_weights_by_lag(form, causal):
    """With keys before the queries, or by distance in both directions."""
    found, memory = FormHeads(heads(), form, LAGS), MEMORY if causal else 0
    for parameter in found.parameters():
        parameter += 0.01
    attention, value = torch.randn(2, T, 4, 3), torch.randn(2, 4, T + memory, 3)
    mixed = found(attention, value, *([] if causal else [AttentionMask(T, T, 0, causal=False)]))
    gate = float(found.rates()["gate"])
    for h in range(3):
        for t in range(memory, T + memory):
            keys = [s for s in range(T + memory) if s < t or (s > t and not causal)]
            product = sum(f(found, h, abs(t - s)) * value[:, h, s] for s in keys)
            expected = (1 - gate) * attention[:, t - memory, h] + gate * product
            torch.testing.assert_close(mixed[:, t - memory, h], expected)
    assert torch.equal(mixed[:, :, 3], attention[:, :, 3])


@pytest.mark.parametrize("form", FORMS)
def test_a_form_starts_as_the_rem_and_trains_all_that_it_has(form):
    rsa = heads()
    found = FormHeads(rsa, form, T + MEMORY - 1)
    attention, value = torch.randn(2, T, 4, 3), torch.randn(2, 4, T + MEMORY, 3)
    expected = rsa(attention, value, AttentionMask(T, T + MEMORY, MEMORY, causal=True))
    same = torch.allclose(found(attention, value), expected, atol=1e-5)
    assert same == (form not in ("unit lag", "nothing"))
    found(attention, value).square().sum().backward()
    assert all(parameter.grad is not None for parameter in found.parameters())
