"""Masks of every convention, read into an AttentionMask and compared with the keys that each query sees."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from references import double_loop, relative_error, visible_keys
from rsa_hf.ops.autograd import solve
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import from_rems
from rsa_hf.ops.pytorch import product_in_pytorch
from rsa_hf.ops.read_mask import flash_document_ids, read_attention_mask
from rsa_hf.rem import Rems
from texts import visible_with_blocks

MIN = torch.finfo(torch.float32).min


def call(T, S, mask, causal=True):
    attention, value = torch.empty(2, T, 3, 4), torch.empty(2, 3, S, 4)
    return read_attention_mask(attention, value, mask, causal=causal, aligned_top_left=True)


def heads(value):
    rates = (torch.tensor(numbers, dtype=value.dtype) for numbers in ([0.9, 0.8, 0.95], [0.0, 0.7, 0.7]))
    return Rems(("regular", "cos", "sin"), *rates, (1, 2, 3), 1, (0, 1, 2))


def product(attention_mask: AttentionMask, value):
    return solve(from_rems(value, heads(value), attention_mask))


def expected_product(value, T, offset, causal, visible):
    rems, where = heads(value), {"query_length": T, "query_offset": offset, "causal": causal, "visible": visible}
    return double_loop(value, rems.kinds, rems.decay, rems.theta, rems.dilation, **where)


@given(
    T=st.integers(1, 9),
    before=st.integers(0, 9),
    behind=st.integers(0, 5),
    left=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    additive=st.booleans(),
)
def test_causal_masks_with_padding_caches_and_empty_slots_are_exact(T, before, behind, left, additive):
    # The queries stand at before … before + T − 1 of a cache with empty slots behind; rows have left padding.
    S = before + T + behind
    key_mask = torch.arange(S)[None, :] >= torch.tensor([min(n, before + T - 1) for n in left])[:, None]
    visible = visible_keys(T, S, query_offset=before, key_mask=key_mask)
    mask = torch.where(visible, 0.0, MIN) if additive else visible
    attention_mask = call(T, S, mask)
    if T == 1:
        assert before in (attention_mask.query_position, attention_mask.query_offset)
    else:
        assert attention_mask.visible is None, "a causal mask with padding has a linear path"
    if 1 < T != S:
        assert attention_mask.query_offset == before
    value = torch.randn(2, 3, S, 2, dtype=torch.float64)
    wanted = expected_product(value, T, before, True, visible)
    real = visible.any(-1)[:, 0]  # a query that is padding sees nothing, and its output is not used
    found = product(attention_mask, value)
    assert relative_error(found.transpose(1, 2)[real], wanted.transpose(1, 2)[real]) < 1e-6


@pytest.mark.parametrize("kind", ["prefix", "hole", "per head"])
def test_other_masks_are_exact_and_warn_of_the_quadratic_path(kind):
    T = 8
    t, s = torch.arange(T)[:, None], torch.arange(T)[None, :]
    visible = {"hole": (s <= t) & ((t != 6) | (s != 3)), "prefix": (s <= t) | (s < 3), "per head": s <= t}[kind]
    visible = visible[None, None].expand(2, 1, -1, -1)
    if kind == "per head":
        visible = visible.repeat(1, 3, 1, 1)
        visible[:, 1, 5, 2] = False
    with pytest.warns(UserWarning, match="quadratic"):
        attention_mask = call(T, T, visible)
    value = torch.randn(2, 3, T, 2, dtype=torch.float64)
    assert relative_error(product(attention_mask, value), expected_product(value, T, 0, True, visible)) < 1e-6


def read_and_traced(value, mask, T):
    """P V by both ways to read a mask: from its values, and in the operators of a graph."""
    S = value.shape[2]
    traced = product_in_pytorch(value, heads(value), AttentionMask(T, S, 0, True, unread_mask=mask))
    return product(call(T, S, mask), value), traced


def errors(value, mask, T, before, visible):
    """The errors of both, for real queries."""
    wanted = expected_product(value, T, before, True, visible).transpose(1, 2)
    own = torch.arange(T)
    real = visible[:, 0, own, before + own]
    return [relative_error(found.transpose(1, 2)[real], wanted[real]) for found in read_and_traced(value, mask, T)]


@pytest.mark.filterwarnings("ignore:unsupported mask")
@given(
    parts=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=4),
    before=st.integers(0, 6),
    behind=st.integers(0, 6),
    left=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    right=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    additive=st.booleans(),
)
@example([(True, 4)], 2, 0, (0, 0), (3, 3), False)  # one token after fewer cached keys than there are queries
@settings(max_examples=200)
def test_positions_of_queries_that_see_ahead_are_found(parts, before, behind, left, right, additive):
    text = "".join((name if is_block else ".") * n for name, (is_block, n) in zip("abcd", parts, strict=False))
    T, S = len(text), before + len(text) + behind
    right = tuple(min(n, T - 1) for n in right)
    left = tuple(min(n, before + T - 1 - r) for n, r in zip(left, right, strict=True))
    visible = visible_with_blocks(text, before, behind, left, right)
    mask = torch.where(visible, 0.0, MIN) if additive else visible
    value = torch.randn(2, 3, S, 2, dtype=torch.float64)
    reads = errors(value, mask, T, before, visible)
    # Where every query sees the last visible key, the mask does not tell how much of the tail is padding. All but one
    # token is assumed where that fits a cache without slots behind the text.
    last = int(visible.any(2)[:, 0].nonzero()[:, 1].max())
    told = bool((visible[:, 0].any(1)[:, last] & ~visible[:, 0, 0, last]).any())
    one_token = last == S - T
    if told or (behind == 0 if one_token else min(right) == 0 or before == 0):
        assert max(reads) < 1e-6
    else:
        assert relative_error(*read_and_traced(value, mask, T)) < 1e-6


@pytest.mark.filterwarnings("error:unsupported mask")  # all these masks take a linear path
@given(
    lengths=st.tuples(*[st.lists(st.integers(1, 9), min_size=1, max_size=6)] * 2),
    before=st.integers(0, 20),
    window=st.none() | st.integers(1, 9),
    causal=st.booleans(),
    additive=st.booleans(),
)
def test_packed_documents_and_windows_are_exact_and_linear(lengths, before, window, causal, additive):
    # Two rows of documents with right padding. The queries are all tokens, or the last ones.
    S = max(sum(row) for row in lengths)
    numbers, key_mask = torch.full((2, S), -1), torch.zeros(2, S, dtype=torch.bool)
    for b, row in enumerate(lengths):
        end = sum(row)
        numbers[b, :end] = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        key_mask[b, :end] = True
    offset = before % S
    T = S - offset
    where = {"causal": causal, "key_mask": key_mask, "documents": numbers, "sliding_window": window}
    visible = visible_keys(T, S, **where)
    mask = torch.where(visible, 0.0, MIN) if additive else visible
    attention_mask = call(T, S, mask, causal=causal)
    value = torch.randn(2, 3, S, 2, dtype=torch.float64)
    poisoned = torch.where(visible.any(2)[..., None], value, torch.nan)
    found, wanted = product(attention_mask, poisoned), expected_product(value, T, offset, causal, visible)
    rows = visible[:, 0].any(-1)  # a query that is padding sees nothing, and its output is not used
    assert relative_error(found.transpose(1, 2)[rows], wanted.transpose(1, 2)[rows]) < 1e-6


def test_a_mask_of_more_keys_than_a_cache_has_kept_is_of_the_last_ones():
    mask = torch.arange(9).expand(2, -1) > torch.tensor([[6], [2]])
    assert call(3, 5, mask).key_mask.equal(mask[:, 4:])


def test_a_position_bias_hides_no_key_and_shows_none():
    bias = torch.randn(1, 3, 5, 5) * 50
    mask = torch.where(torch.ones(5, 5).tril().bool(), bias, MIN)
    assert (call(5, 5, mask).visible, call(5, 5, mask).key_mask) == (None, None)
    assert not call(5, 5, mask, causal=False).causal  # what is remembered is of one direction
    assert call(5, 5, torch.where(torch.ones(5, 5).tril().bool(), bias, bias - 10_000)).visible is None


@pytest.mark.parametrize("inference", [False, True])
def test_positions_that_change_in_place_are_read_anew(inference):
    with torch.inference_mode(inference):  # where there is no version counter
        attention, value, positions = torch.empty(1, 5, 2, 3), torch.empty(1, 2, 5, 3), torch.tensor([[0, 1, 0, 1, 2]])
        assert flash_document_ids(attention, value, {"position_ids": positions}).tolist() == [[1, 1, 2, 2, 2]]
        positions[0, 2:] += 2  # one document now
        assert flash_document_ids(attention, value, {"position_ids": positions}) is None


@pytest.mark.parametrize(
    "mask", [object(), torch.ones(2, 5, 5), torch.ones(2, 3), torch.ones(2, 1, 4, 5), torch.ones(2, 1, 5, 3)]
)
def test_a_mask_that_cannot_be_read_is_an_error(mask):
    with pytest.raises((TypeError, ValueError), match="mask"):
        call(5, 5, mask)
