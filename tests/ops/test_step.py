"""A step of generation, one query behind a cache, through `RSAHeads` on every backend, against the last row of P."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops.mixed_product import device
from references import equation_4
from rsa_hf.config import HeadConfig, RSAConfig
from rsa_hf.layer import RSAHeads
from rsa_hf.ops.read_mask import read_attention_mask

S = 45


def named_layer(H):
    heads = [(1, "regular", 0.9, 1), (2, "sin", 0.8, 1), (4, "regular", -0.5, 3), (H - 1, "cos", 0.97, 2)]
    named = [HeadConfig(0, head, kind, decay, 0.3, theta=0.7, dilation=d) for head, kind, decay, d in heads]
    return RSAHeads(RSAConfig(heads=named).layer_specs([H])[0])


def layer(H=6, gate=0.3):
    dilated = {"num_dilated_cyclical_pairs": 1, "dilation": [3, 5]}
    return RSAHeads(RSAConfig(num_regular=2, num_cyclical_pairs=1, **dilated, gate_init=gate).layer_specs([H])[0])


def tensors(H=6, Hv=6, D=16, dtype=torch.float64):
    return [torch.randn(2, *shape, D, dtype=dtype, device=device()) for shape in ((1, H), (Hv, S))]


def row(value, seen=None, window=None):
    """The mask of a last query, read as it is in a model."""
    mask = None if seen is None else seen[:, :, None]
    return read_attention_mask(
        value[:, :, :1].transpose(1, 2), value, mask, causal=True, aligned_top_left=True, sliding_window=window
    )


@torch.no_grad()
def step(heads, attention, value, mask=None):
    return heads(attention, value, row(value) if mask is None else mask)


@torch.no_grad()
def expected_step(heads, attention, value, position=S - 1, visible=None):
    return equation_4(heads, attention.double(), value, query_offset=position, visible=visible)


@pytest.mark.slow_unless(backend=["pytorch", "cpp"], D=[33, 17])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize(
    ("make", "H", "Hv", "D"),
    [
        *((layer, *sizes) for sizes in ((6, 6, 1), (6, 2, 33), (8, 2, 64), (6, 3, 100))),
        *((named_layer, *sizes) for sizes in ((6, 6, 5), (12, 4, 17))),
    ],
)
def test_a_step_agrees_with_dense_p(backend, dtype, tolerance, make, H, Hv, D):
    if backend == "triton":  # its kernels take no float64, and interpreted they are slow
        D = min(D, 64 if dtype == torch.float32 else 17)
        dtype, tolerance = (torch.float16, 3e-3) if dtype == torch.float64 else (dtype, tolerance)
    heads, (attention, value), slots = make(H).to(device()), tensors(H, Hv, D, dtype), torch.arange(S, device=device())
    padding = slots >= torch.tensor([[[7]], [[0]]], device=device())
    masks = {
        "none": (None, S - 1, None),
        **{f"window of {w}": (None, S - 1, w) for w in (1, 2, 9)},
        "left padding": (padding, S - 1, None),
        "static cache": ((slots <= 30).expand(2, 1, -1), 30, None),
        "other keys for each head": ((torch.rand(2, H, S, device=device()) < 0.7) | (slots == S - 1), S - 1, None),
        "static cache and padding": ((slots <= 30) & padding, 30, None),
    }
    if backend == "triton" and dtype != torch.float32:
        masks = {name: masks[name] for name in ("window of 9", "static cache and padding")}
    for name, (seen, position, window) in masks.items():
        visible = torch.ones(2, 1, S, dtype=torch.bool, device=device()) if seen is None else seen
        visible = visible & (position - slots < (window or S))
        expected = expected_step(heads, attention, value, position, visible[:, :, None])
        hidden = value.clone()
        if window is not None:
            hidden[:, :, : S - window] = math.nan  # not to be read
        found = step(heads, attention, hidden, row(value, seen, window))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=name)
    # The control: the last slot is another position.
    other = expected_step(heads, attention, value, 30)
    assert not torch.allclose(other, expected_step(heads, attention, value), atol=1e-3)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (0, 1, 3, 2)])
@pytest.mark.usefixtures("backend")
def test_tensors_of_any_layout_agree(order):
    heads, (attention, value) = layer(8).to(device()), tensors(8, 4, dtype=torch.float32)
    laid_out = value.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    wide = torch.randn(2, 8, 1, 16, device=device()).transpose(1, 2).copy_(attention)
    found, expected = step(heads, wide, laid_out), expected_step(heads, attention, value)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [layer, named_layer])
def test_a_compiled_step_reads_v_in_half_precision_without_a_copy(make):
    """A matrix product would take a copy of the cache in float32."""
    heads, (attention, value), graphs = make(8), tensors(8, 4, dtype=torch.bfloat16), []
    mask = row(value, (torch.arange(S) <= 30).expand(2, 1, -1))
    keep = lambda graph, inputs: graphs.append(graph) or graph  # noqa: E731
    with torch.no_grad():
        found = torch.compile(lambda *given: heads(*given, mask), backend=keep, fullgraph=True)(attention, value)
    assert "sum" in str(graphs[0].graph) and "bmm" not in str(graphs[0].graph)
    assert torch.equal(found, step(heads, attention, value, mask))


def test_a_step_in_inference_mode_leaves_nothing_for_a_graph():
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


def parametrized(heads):
    if heads._modules:
        heads.parametrizations.nu.original.data.add_(0.02)
    else:
        torch.nn.utils.parametrize.register_parametrization(heads, "nu", torch.nn.Tanh())


CHANGES = {
    "through data": lambda heads: heads.nu.data.add_(0.02),
    "new parameter": lambda heads: setattr(heads, "nu", torch.nn.Parameter(heads.nu.detach() + 0.02)),
    "parametrized": parametrized,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.usefixtures("cpu_backend")
def test_a_step_follows_parameters_that_change(change):
    heads, (attention, value) = layer(), tensors()
    before = step(heads, attention, value)
    for _ in range(2):
        change(heads)
        found = step(heads, attention, value)
        torch.testing.assert_close(found, expected_step(heads, attention, value), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(found, before)


class NoWaiting(TorchDispatchMode):
    """Fail at an operator for which the host waits for a value from the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name.removeprefix("aten::") not in self.WAITS, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device():
    heads, (attention, value) = layer(), tensors()
    mask = (torch.arange(S) <= 30).expand(2, 1, -1)

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
