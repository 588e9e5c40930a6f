"""A step of generation, one query behind a cache, through `RSAHeads`: in C++ and in PyTorch, against the last row of P."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops.agreement import DILATION, KINDS, draw
from references import equation_4
from rsa_hf.config import HeadConfig, RSAConfig
from rsa_hf.layer import RSAHeads
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.cpp.step import CppStep
from rsa_hf.ops.decode import LagTable, decode
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.read_mask import read_attention_mask
from rsa_hf.ops.reference import dense_rem_product
from rsa_hf.rem import Rems

S = 45
needs_compiler = pytest.mark.skipif(isinstance(library(), str), reason=str(library()))
BACKENDS = [pytest.param("cpp", marks=needs_compiler), "pytorch"]


@pytest.fixture
def counted(monkeypatch):
    """The steps that the C++ computes."""
    calls, original = [], CppStep.__call__
    monkeypatch.setattr(CppStep, "__call__", lambda self, *given: calls.append(self) or original(self, *given))
    return calls


def named_layer(H):
    heads = [(1, "regular", 0.9, 1), (2, "sin", 0.8, 1), (4, "regular", -0.5, 3), (H - 1, "cos", 0.97, 2)]
    named = [HeadConfig(0, head, kind, decay, 0.3, theta=0.7, dilation=d) for head, kind, decay, d in heads]
    return RSAHeads(RSAConfig(heads=named).layer_specs([H])[0])


def layer(H=6, gate=0.3):
    dilated = {"num_dilated_cyclical_pairs": 1, "dilation": [3, 5]}
    return RSAHeads(RSAConfig(num_regular=2, num_cyclical_pairs=1, **dilated, gate_init=gate).layer_specs([H])[0])


def tensors(H=6, Hv=6, D=16, dtype=torch.float64):
    return torch.randn(2, 1, H, D, dtype=dtype), torch.randn(2, Hv, S, D, dtype=dtype)


def row(value, seen=None, window=None):
    """The mask of a last query, read as it is in a model."""
    mask = None if seen is None else seen[:, None, None]
    return read_attention_mask(value[:, :, :1], value, mask, causal=True, aligned_top_left=True, sliding_window=window)


@torch.no_grad()
def step(heads, attention, value, mask=None):
    return heads(attention, value, row(value) if mask is None else mask)


@torch.no_grad()
def expected_step(heads, attention, value, position=S - 1, visible=None):
    return equation_4(heads, attention.double(), value, query_offset=position, visible=visible)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize(("H", "Hv", "D"), [(6, 6, 1), (6, 2, 33), (8, 2, 64), (12, 4, 100)])
@pytest.mark.parametrize("make", [layer, named_layer])
def test_a_step_agrees_with_dense_p(counted, monkeypatch, backend, dtype, tolerance, H, Hv, D, make):
    monkeypatch.setenv("RSA_HF_BACKEND", backend)
    heads, (attention, value), slots = make(H), tensors(H, Hv, D, dtype), torch.arange(S)
    padding = slots >= torch.tensor([[7], [0]])
    masks = {
        "none": (None, S - 1, None),
        **{f"window of {w}": (None, S - 1, w) for w in (1, 2, 9)},
        "left padding": (padding, S - 1, None),
        "static cache": ((slots <= 30).expand(2, -1), 30, None),
        "static cache and padding": ((slots <= 30) & padding, 30, None),
    }
    for name, (seen, position, window) in masks.items():
        visible = torch.ones(2, S, dtype=torch.bool) if seen is None else seen
        visible = visible & (position - slots < (window or S))
        expected = expected_step(heads, attention, value, position, visible[:, None, None])
        hidden = value.clone()
        if window is not None:
            hidden[:, :, : S - window] = math.nan  # not to be read
        for _ in range(2):  # the second step takes the kept weights
            found = step(heads, attention, hidden, row(value, seen, window))
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, msg=name)
    assert len(counted) == (8 if backend == "cpp" and dtype != torch.bfloat16 else 0)
    # The control: the last slot is another position.
    other = expected_step(heads, attention, value, 30)
    assert not torch.allclose(other, expected_step(heads, attention, value), atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_step_at_another_position_is_caught(monkeypatch, shift):
    heads, (attention, value) = layer(), tensors()
    expected = expected_step(heads, attention, value)
    original = CppStep.__call__
    broken = AttentionMask(1, S, S - 1 + min(shift, 0), True)
    monkeypatch.setattr(CppStep, "__call__", lambda self, a, v, m: original(self, a, v.roll(max(shift, 0), 2), broken))
    assert not torch.allclose(step(heads, attention, value), expected, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (0, 1, 3, 2)])
def test_tensors_of_any_layout_agree(counted, order):
    heads, (attention, value) = layer(8), tensors(8, 4)
    laid_out = value.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    wide = torch.randn(2, 8, 1, 16).double().transpose(1, 2).copy_(attention)
    torch.testing.assert_close(step(heads, wide, laid_out), expected_step(heads, attention, value))
    assert len(counted) == (order[3] == 3)  # where channels are neighbours, in place


@needs_compiler
def test_a_shut_gate_changes_no_bit(counted):
    attention, value = tensors()
    assert torch.equal(step(layer(gate=-math.inf), attention, value), attention)
    assert len(counted) == 1


@pytest.mark.parametrize("places", [tuple(range(6)), (1, 2, 4, 6, 7, 9)])
def test_a_compiled_step_in_half_precision_agrees(places):
    _, decay, theta = (tensor.detach() for tensor in draw(1))
    rems, value = Rems(KINDS, decay, theta, DILATION, 2, places), torch.randn(2, 6, S, 3).bfloat16()
    mask = row(value, (torch.arange(S) <= 30).expand(2, -1))
    compiled = torch.compile(lambda value: decode(value, rems, mask, None), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(value), decode(value, rems, mask, None), rtol=1e-5, atol=1e-6)


def test_a_table_leaves_out_only_negligible_lags():
    rems = Rems(("regular", "cos"), torch.tensor([-0.9, 0.5]), torch.zeros(2), (1, 7), 1, (0, 1))
    table = LagTable(rems, torch.float32, 10_000)
    assert 200 < table.weights.shape[1] < 300
    value = torch.ones(1, 2, 5000, 1)
    rates = (rems.decay.double(), rems.theta)
    exact = dense_rem_product(value.double(), ("regular", "cos"), *rates, (1, 7), query_length=1)
    assert float((decode(value, rems, row(value), table) - exact).abs().max()) < 1e-6


def test_a_table_made_in_inference_mode_is_not_used_in_a_graph():
    heads, (attention, value) = layer(), tensors()
    heads.requires_grad_(False)
    with torch.inference_mode():
        expected = heads(attention, value, row(value)).clone()
    found = heads(attention.requires_grad_(), value, row(value))
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    assert float(attention.grad.abs().min()) > 0


def test_a_head_that_never_decays_reads_the_whole_growing_cache():
    heads, (attention, _) = layer(), tensors(dtype=torch.float32)
    with torch.no_grad():
        heads.eta.fill_(10.0)  # tanh(200) is 1 in float32: every lag matters
    long = torch.randn(2, 6, 4 * S, 16)
    for length in range(1, 4 * S, 13):
        keys = long[:, :, :length]
        trained = heads(attention, keys, row(keys))  # the path with gradients
        torch.testing.assert_close(step(heads, attention, keys), trained, rtol=1e-4, atol=1e-4)


class NoWaiting(TorchDispatchMode):
    """Fail at an operator for which the host waits for a value from the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name.removeprefix("aten::") not in self.WAITS, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device():
    heads, (attention, value) = layer(), tensors()
    mask = (torch.arange(S) <= 30).expand(2, -1)

    def steps():
        step(heads, attention, value)
        step(heads, attention, value, row(value, mask.clone()))

    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        mask.any().item()  # the control
    steps()  # the first step reads once how far back to look
    with NoWaiting():
        steps()


def test_a_step_ignores_autocast():
    """So does the whole product. Sums in half precision would be inexact."""
    heads, (attention, value) = layer(), tensors(dtype=torch.bfloat16)
    attention = attention.float()
    expected = step(heads, attention, value)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(heads, attention, value), expected)
