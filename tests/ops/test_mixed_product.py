"""P V mixed into attention by every backend, against dense P in float64: values and gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.mixed_product import KINDS, SUMS, agreement, assert_agrees, device, draw
from rsa_hf import rem_product
from rsa_hf.ops.autograd import solve
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import from_rems
from rsa_hf.rem import Rems

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize(("offset", "causal"), [(None, True), (7, True), (9, False)])
def test_keys_before_and_behind_the_queries_agree_with_dense_p(offset, causal):
    T, S = 20, 41
    tensors = draw(T, S)
    if causal and offset is not None:
        # In a static cache, slots behind the queries are not yet written.
        tensors[0].data[:, :, offset + T :] = math.nan
    assert_agrees(agreement(tensors, offset=offset, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
def test_hidden_keys_are_not_read(causal):
    tensors = draw(35, B=2)
    key_mask = torch.ones(2, 35, dtype=torch.bool)
    key_mask[0, :18] = False
    key_mask[1, -3:] = False
    tensors[0].data[~key_mask[:, None].expand(-1, 3, -1).to(device())] = math.nan
    assert_agrees(agreement(tensors, causal=causal, key_mask=key_mask))


@pytest.mark.parametrize("causal", [True, False])
def test_windows_and_any_visible_mask_agree_with_dense_p(causal):
    visible = torch.rand(2, 1, 21, 21) < 0.6
    assert_agrees(agreement(draw(21, B=2), causal=causal, visible=visible))
    assert_agrees(agreement(draw(21, B=2), causal=causal, window=4))


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_agree_with_dense_p(causal):
    key_mask, ends = torch.ones(2, 35, dtype=torch.bool), torch.zeros(2, 35, dtype=torch.long)
    key_mask[0, 5:8] = False
    ends[0, [3, 4, 16, 20]] = ends[1, 18] = 1  # inside chunks and at their borders
    documents = ends.cumsum(1) * 7 % 5  # numbers of neighbours differ
    assert_agrees(agreement(draw(35, B=2), causal=causal, documents=documents, key_mask=key_mask))


@pytest.mark.slow_unless(backend=["pytorch", "cpp"], groups=[3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [((1, 2, 4), 1), ((0, 3, 5), 1), ((1, 2, 4), 2), ((2, 4, 5), 3)])
def test_rsa_heads_in_any_position_agree_with_dense_p(heads, groups, causal):
    tensors = draw(37, B=2, plain=3, value_heads=6 // groups)
    unread = [h for h in range(6 // groups) if h not in {head // groups for head in heads}]
    tensors[0].data[:, unread] = math.nan
    assert_agrees(agreement(tensors, groups=groups, heads=heads, causal=causal))


def test_rsa_heads_in_another_position_are_caught():
    errors = agreement(draw(20, plain=3, value_heads=6), heads=(0, 3, 5), expected_heads=(0, 2, 5))
    assert min(errors["output"], errors["dvalue"], errors["dattention"]) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_dense_p(dtype):
    assert_agrees(agreement(draw(33, dtype=dtype), causal=False), dtype)


@pytest.mark.parametrize("D", [5, 80])
def test_odd_head_sizes_agree_with_dense_p(D):
    assert_agrees(agreement(draw(18, D=D, heads=1), KINDS[1:2], (1,)))


def test_a_dilation_longer_than_the_text_agrees_with_dense_p():
    assert_agrees(agreement(draw(9, heads=2), KINDS[:2], (8, 90)))


def test_strided_and_expanded_tensors_agree_with_dense_p():
    value, _, theta, attention, _ = draw(20)
    # The channels are apart in memory, and all heads share one gate and one rate.
    apart = value.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    attention_apart = attention.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    one, shared_gate = (torch.tensor([x], device=device()).expand(3).detach().requires_grad_() for x in (0.9, 0.3))
    assert one.stride() == (0,)
    assert_agrees(agreement([apart, one, theta, attention_apart, shared_gate]))


@pytest.mark.slow_unless(backend=["pytorch", "cpp"])
def test_random_shapes_and_masks_agree_with_dense_p(backend, monkeypatch):
    if backend == "triton":
        monkeypatch.setattr("rsa_hf.ops.triton.launch._splits", lambda *sizes: 2)
    # Interpreted kernels are slow.
    examples, most, dilation, longest = (6, 2, 4, 40) if backend == "triton" else (60, 4, 40, 80)

    @settings(max_examples=examples)
    @given(
        T=st.integers(1, longest),
        before=st.integers(0, longest),
        behind=st.integers(0, 5),
        causal=st.booleans(),
        heads=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, dilation)), min_size=1, max_size=most),
        groups=st.integers(1, 3),
        cuts=st.sets(st.integers(1, 2 * longest), max_size=4),
        hidden=st.sets(st.integers(0, 2 * longest), max_size=4),
        window=st.none() | st.integers(1, 50),
        D=st.integers(1, 40),
        seed=st.integers(0, 10_000),
    )
    def agrees(T, before, behind, causal, heads, groups, cuts, hidden, window, D, seed):
        torch.manual_seed(seed)
        S = T + before + behind
        if T <= 16 < S:
            T, before = S - behind, 0  # few queries take another path
        kinds, dilation = zip(*heads, strict=True)
        tensors = draw(T, S, B=2, D=D, heads=len(kinds), groups=groups)
        tensors[1].data.uniform_(-1, 1)
        tensors[2].data.uniform_(-3, 3)
        documents = torch.zeros(2, S, dtype=torch.long)
        for cut in cuts:
            documents[:, cut:] += 1
        key_mask = torch.ones(1, S, dtype=torch.bool)
        key_mask[0, [place for place in hidden if place < S]] = False
        masks = (key_mask if hidden else None, documents if cuts else None, window)
        errors = agreement(tensors, kinds, dilation, groups, before, causal, *masks)
        # The relative error of a sum that is nearly zero is large.
        assert_agrees({name: error for name, error in errors.items() if name not in SUMS})
        assert all(error < 1e-3 for error in errors.values()), errors

    agrees()


@pytest.mark.parametrize("queries", [2, 11])
def test_the_output_is_laid_out_as_attention_is(queries):
    """Models take views of it; with few queries after a cache P is explicit."""
    value, decay, theta, attention, gate = draw(queries, S=11, plain=0)
    attention = attention.detach().contiguous()
    rems = Rems(KINDS, decay, theta, (1, 2, 1), 1, (0, 1, 2))
    mask = AttentionMask(queries, 11, 11 - queries, causal=True)
    mixed = solve(from_rems(value, rems, mask, attention, gate))
    assert mixed.flatten(2).data_ptr() == mixed.view(1, queries, -1).data_ptr()


def test_results_are_deterministic():
    tensors = draw(35)
    runs = []
    for _ in range(2):
        output = rem_product(*tensors[:1], KINDS, *tensors[1:3], (1, 2, 1))
        runs.append([output, *torch.autograd.grad(output.square().sum(), tensors[:3])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
