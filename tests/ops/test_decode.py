"""Decoding, one query behind a cache: against the whole product, with tables kept from step to step."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from ops.agreement import DILATION, KINDS, draw
from rsa_hf.config import RSAConfig
from rsa_hf.layer import RSAHeads
from rsa_hf.ops.decode import LagTable, decode
from rsa_hf.ops.read_mask import read_attention_mask
from rsa_hf.ops.reference import dense_rem_product
from rsa_hf.rem import Rems

S = 50
HEADS = tuple(range(len(KINDS)))


def inputs(groups=1, heads=HEADS):
    value, decay, theta = (tensor.detach() for tensor in draw(S))
    value = value[:, : heads[-1] // groups + 1] if heads[-1] // groups < 6 else value.repeat(1, 2, 1, 1)
    return value, Rems(KINDS, decay, theta, DILATION, groups, heads)


def whole(value, rems, position, visible=None):
    read = value[:, [head // rems.heads_per_value for head in rems.heads]]
    masks = {"query_length": 1, "query_offset": position, "visible": visible}
    return dense_rem_product(read, KINDS, rems.decay, rems.theta, DILATION, **masks)


def tables(rems):
    return [None, LagTable(rems, torch.float64, S), LagTable(rems, torch.float64, 10 * S)]


def mask_of(mask, **keywords):
    query, key = torch.empty(2, 6, 1, 3), torch.empty(2, 6, S, 3)
    return read_attention_mask(query, key, mask, causal=True, aligned_top_left=True, **keywords)


@pytest.mark.parametrize("heads", [HEADS, (1, 2, 4, 6, 7, 9)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_step_agrees_with_the_whole_product(groups, heads):
    value, rems = inputs(groups, heads)
    slots = torch.arange(S)
    masks = {
        "none": (None, S - 1, None),
        "left padding": (slots >= torch.tensor([[7], [0]]), S - 1, None),
        "static cache": ((slots <= 30).expand(2, -1), 30, None),
        "static cache and padding": ((slots <= 30) & (slots >= torch.tensor([[7], [0]])), 30, None),
        "sliding window": (None, S - 1, 9),
    }
    for seen, position, window in masks.values():
        visible = torch.ones(2, S, dtype=torch.bool) if seen is None else seen
        visible = visible & (S - 1 - slots < (window or S))
        expected = whole(value, rems, position, visible[:, None, None])
        mask = None if seen is None else seen[:, None, None]
        for table in tables(rems):
            found = decode(value, rems, mask_of(mask, sliding_window=window), table)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # The control: the last slot is another position.
    assert not torch.allclose(whole(value, rems, 30), whole(value, rems, S - 1))


@pytest.mark.parametrize("heads", [HEADS, (1, 2, 4, 6, 7, 9)])
def test_a_compiled_step_in_half_precision_agrees(heads):
    value, rems = inputs(2, heads)
    value = value.bfloat16()
    mask = mask_of((torch.arange(S) <= 30).expand(2, -1)[:, None, None])
    compiled = torch.compile(lambda value: decode(value, rems, mask, None), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(value), decode(value, rems, mask, None), rtol=1e-5, atol=1e-6)


def test_a_table_leaves_out_only_negligible_lags():
    rems = Rems(("regular", "cos"), torch.tensor([-0.9, 0.5]), torch.zeros(2), (1, 7), 1, (0, 1))
    table = LagTable(rems, torch.float32, 10_000)
    assert 200 < table.weights.shape[1] < 300
    value = torch.ones(1, 2, 5000, 1)
    rates = (rems.decay.double(), rems.theta)
    exact = dense_rem_product(value.double(), rems.kinds, *rates, (1, 7), query_length=1)
    long = read_attention_mask(torch.empty(1, 2, 1, 1), value, None, causal=True, aligned_top_left=True)
    assert float((decode(value, rems, long, table) - exact).abs().max()) < 1e-6


def layer():
    plan = RSAConfig(num_regular=2, num_cyclical_pairs=2, gate_init=0.0).layer_plans([8])[0]
    heads = RSAHeads(plan)
    return heads, torch.randn(2, 1, 8, 4), torch.randn(2, 8, S, 4)


def row(value):
    return read_attention_mask(value[:, :, :1], value, None, causal=True, aligned_top_left=True)


@torch.no_grad()
def test_a_changed_parameter_changes_the_next_step():
    heads, attention, value = layer()
    before = heads(attention, value, row(value))
    assert torch.equal(heads(attention, value, row(value)), before)
    for name in ("mu", "eta", "nu", "theta"):
        getattr(heads, name).add_(0.02)
        changed = heads(attention, value, row(value))
        assert not torch.allclose(changed, before), name
        fresh = RSAHeads(heads.plan)
        fresh.load_state_dict(heads.state_dict())
        assert torch.equal(fresh(attention, value, row(value)), changed)
        before = changed
    # So does new storage, and a new parameter.
    heads.nu.data = heads.nu.data + 0.02
    changed = heads(attention, value, row(value))
    assert not torch.allclose(changed, before)
    heads.nu = torch.nn.Parameter(heads.nu.detach() + 0.02)
    before = heads(attention, value, row(value))
    assert not torch.allclose(changed, before)


@torch.no_grad()
def test_a_changed_parameter_behind_a_parametrization_changes_the_next_step():
    heads, attention, value = layer()
    parametrize.register_parametrization(heads, "mu", torch.nn.Hardtanh(-0.1, 0.1))
    before = heads(attention, value, row(value))
    heads.parametrizations.mu.original.add_(0.02)
    assert not torch.allclose(heads(attention, value, row(value)), before)


def test_a_table_made_in_inference_mode_is_not_used_in_a_graph():
    heads, attention, value = layer()
    heads.requires_grad_(False)
    with torch.inference_mode():
        expected = heads(attention, value, row(value)).clone()
    found = heads(attention.requires_grad_(), value, row(value))
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    assert float(attention.grad.abs().min()) > 0


@torch.no_grad()
def test_copies_and_pickles_keep_no_tables():
    heads, attention, value = layer()
    expected = heads(attention, value, row(value))
    assert heads._cache.kept is not None
    for other in (copy.deepcopy(heads), pickle.loads(pickle.dumps(heads))):
        assert other._cache.kept is None
        assert torch.equal(other(attention, value, row(value)), expected)


@torch.no_grad()
def test_a_head_that_never_decays_reads_the_whole_growing_cache():
    heads, attention, _ = layer()
    heads.eta.fill_(10.0)  # tanh(200) is 1 in float32: every lag matters
    long = torch.randn(2, 8, 4 * S, 4)
    for length in range(1, 4 * S, 13):
        keys = long[:, :, :length]
        found = heads(attention, keys, row(keys))
        with torch.enable_grad():
            trained = heads(attention, keys, row(keys))  # the path with gradients
        torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-4)


class NoWaiting(TorchDispatchMode):
    """Fail at an operator for which the host waits for a value from the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name.removeprefix("aten::") not in self.WAITS, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_no_step_waits_for_the_device():
    heads, attention, value = layer()
    mask = (torch.arange(S) <= 30).expand(2, 1, 1, -1)

    def step():
        heads(attention, value, row(value))
        heads(attention, value, mask_of(mask.clone()))

    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        mask.any().item()  # the control
    step()  # the first step reads once how far back to look
    with NoWaiting():
        step()


@pytest.mark.parametrize("kept", [False, True])
def test_a_step_ignores_autocast(kept):
    """So does the whole product. Sums in half precision would be inexact."""
    value, rems = inputs()
    value = value.to(torch.bfloat16)
    rems = Rems(KINDS, rems.decay.float(), rems.theta.float(), DILATION, 1, HEADS)
    table = LagTable(rems, torch.float32, S) if kept else None
    expected = decode(value, rems, mask_of(None), table)
    with torch.autocast("cpu", torch.bfloat16):
        found = decode(value, rems, mask_of(None), table)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
