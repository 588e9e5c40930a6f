"""A step of generation in C++, through `RSAHeads`, against the last row of dense P."""

import math

import pytest
import torch

from rsa_hf.config import HeadConfig, RSAConfig
from rsa_hf.layer import RSAHeads
from rsa_hf.ops.cpp import build
from rsa_hf.ops.cpp.step import CppStep
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.reference import dense_rem_product

S = 45

pytestmark = [
    pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library())),
    pytest.mark.usefixtures("counted"),
]


@pytest.fixture
def counted(monkeypatch):
    """The steps that the C++ computes."""
    monkeypatch.delenv("RSA_HF_BACKEND", raising=False)
    calls, original = [], CppStep.__call__
    monkeypatch.setattr(CppStep, "__call__", lambda self, *given: calls.append(self) or original(self, *given))
    return calls


def named_layer(H):
    heads = [(1, "regular", 0.9, 1), (2, "sin", 0.8, 1), (4, "regular", -0.5, 3), (H - 1, "cos", 0.97, 2)]
    named = [HeadConfig(0, head, kind, decay, 0.3, theta=0.7, dilation=d) for head, kind, decay, d in heads]
    return RSAHeads(RSAConfig(heads=named).layer_plans([H])[0])


def layer(H, gate=0.3):
    config = RSAConfig(
        num_regular=2, num_cyclical_pairs=1, num_dilated_cyclical_pairs=1, dilation=[3, 5], gate_init=gate
    )
    return RSAHeads(config.layer_plans([H])[0])


def tensors(H, Hv, D, dtype=torch.float64):
    return torch.randn(3, 1, H, D, dtype=dtype), torch.randn(3, Hv, S, D, dtype=dtype)


def mask_of(window=None, **more):
    return AttentionMask(1, S, S - 1, True, sliding_window=window, **more)


@torch.no_grad()
def step(heads, attention, value, mask):
    return heads(attention, value, mask)


@torch.no_grad()
def expected_step(heads, attention, value, window=None):
    """Equation 4 with the last row of P."""
    H, places = attention.shape[2], list(heads.plan.heads)
    rates = heads.rates(torch.float64)
    decay, theta = heads.per_head(rates)
    visible = (S - 1 - torch.arange(S) < (window or S))[None, None, None]
    masks = {"query_length": 1, "query_offset": S - 1, "visible": visible}
    keys = torch.where(visible[0, 0, 0][:, None], value, 0).double()
    keys = keys[:, [place // (H // value.shape[1]) for place in places]]
    product = dense_rem_product(keys, heads.plan.kinds, decay, theta, heads.plan.dilations, **masks)
    g, mixed = rates["gate"][:, None], attention.double().clone()
    mixed[:, :, places] = (1 - g) * mixed[:, :, places] + g * product.transpose(1, 2)
    return mixed


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("H", "Hv", "D"), [(6, 6, 1), (6, 6, 16), (6, 2, 33), (8, 2, 64), (12, 4, 100)])
@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize("make", [layer, named_layer])
def test_a_step_agrees_with_dense_p(counted, dtype, tolerance, H, Hv, D, window, make):
    heads, (attention, value) = make(H), tensors(H, Hv, D, dtype)
    expected = expected_step(heads, attention, value, window)
    if window is not None:
        value[:, :, : S - window] = math.nan  # not to be read
    found = step(heads, attention, value, mask_of(window))
    assert len(counted) == 1
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_step_at_another_position_is_caught(monkeypatch, shift):
    heads, (attention, value) = layer(6), tensors(6, 6, 16)
    expected = expected_step(heads, attention, value)
    torch.testing.assert_close(step(heads, attention, value, mask_of()), expected)
    original = CppStep.__call__
    broken = AttentionMask(1, S, S - 1 + min(shift, 0), True)
    monkeypatch.setattr(CppStep, "__call__", lambda self, a, v, m: original(self, a, v.roll(max(shift, 0), 2), broken))
    assert not torch.allclose(step(heads, attention, value, mask_of()), expected, atol=1e-3)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)])
def test_tensors_of_any_layout_are_read_in_place(counted, order):
    heads, (attention, value) = layer(8), tensors(8, 4, 16)
    back = [order.index(i) for i in range(4)]
    laid_out = value.permute(order).contiguous().permute(back)
    wide = torch.randn(3, 8, 1, 16).double().transpose(1, 2).copy_(attention)
    found = step(heads, wide, laid_out, mask_of())
    assert len(counted) == 1
    torch.testing.assert_close(found, expected_step(heads, attention, value))


@pytest.mark.parametrize("why", ["padding", "channels", "dtype", "graph"])
def test_what_it_does_not_take_is_computed_in_pytorch(counted, why):
    heads, (attention, value) = layer(6), tensors(6, 6, 16)
    expected, mask, tolerance = expected_step(heads, attention, value), mask_of(), 1e-7
    if why == "padding":
        mask = mask_of(key_mask=torch.ones(1, S, dtype=torch.bool))
    elif why == "channels":
        value = value.mT.contiguous().mT
    elif why == "dtype":
        attention, value, tolerance = attention.bfloat16(), value.bfloat16(), 3e-2
    else:
        attention.requires_grad_()
        heads.requires_grad_(False)
    found = heads(attention, value, mask) if why == "graph" else step(heads, attention, value, mask)
    assert not counted
    assert found.requires_grad == (why == "graph")
    torch.testing.assert_close(found.detach().double(), expected, rtol=tolerance, atol=tolerance)


def test_a_shut_gate_changes_no_bit(counted):
    attention, value = tensors(6, 6, 16)
    assert torch.equal(step(layer(6, gate=-math.inf), attention, value, mask_of()), attention)
    assert not torch.equal(step(layer(6), attention, value, mask_of()), attention)
    assert len(counted) == 2


def test_the_second_step_of_a_generation_takes_the_kept_weights(counted, monkeypatch):
    heads, (attention, value) = layer(6), tensors(6, 6, 16)
    first = step(heads, attention, value, mask_of())
    monkeypatch.setattr(RSAHeads, "_rems_and_gate", None)
    assert torch.equal(step(heads, attention, value, mask_of()), first)
    assert counted[0] is counted[1]
