"""Masks of every convention, read into an AttentionMask, and checked against who really sees whom."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broken import farthest
from references import double_loop, relative_error
from rsa_hf.integration.attention import flash_segment_ids, read_attention_mask
from rsa_hf.ops.autograd import apply_rems, traced_forward
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.rem import Rems

MIN = torch.finfo(torch.float32).min


def call(T, S, mask, causal=True, aligned_top_left=True, **keywords):
    query, key = torch.empty(2, 3, T, 4), torch.empty(2, 3, S, 4)
    return read_attention_mask(query, key, mask, causal=causal, aligned_top_left=aligned_top_left, **keywords)


def heads(value):
    rates = torch.tensor([0.9, 0.8, 0.95], dtype=value.dtype), torch.full((3,), 0.7, dtype=value.dtype)
    return Rems(("regular", "cos", "sin"), *rates, (1, 2, 3), 1)


def product(attention_mask: AttentionMask, value):
    return apply_rems(value, heads(value), attention_mask)


def expected_product(value, T, offset, causal, visible):
    rates = torch.tensor([0.9, 0.8, 0.95], dtype=value.dtype), torch.full((3,), 0.7, dtype=value.dtype)
    return double_loop(value, ["regular", "cos", "sin"], *rates, [1, 2, 3], T, offset, causal, visible)


def causal_visible(T, S, offset, key_mask):
    seen = torch.arange(S)[None, :] <= (offset + torch.arange(T))[:, None]
    return seen[None, None] & key_mask[:, None, None, :]


@given(
    T=st.integers(1, 9),
    before=st.integers(0, 9),
    behind=st.integers(0, 5),
    left=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    additive=st.booleans(),
)
def test_causal_masks_with_padding_caches_and_empty_slots(T, before, behind, left, additive):
    # Queries at before … before + T − 1 of a cache with empty slots behind; rows padded on the left.
    S = before + T + behind
    key_mask = torch.arange(S)[None, :] >= torch.tensor([min(n, before + T - 1) for n in left])[:, None]
    visible = causal_visible(T, S, before, key_mask)
    mask = torch.where(visible, 0.0, MIN) if additive else visible
    attention_mask = call(T, S, mask)
    if T == 1:
        assert attention_mask.query_position == before
    else:
        assert attention_mask.visible is None, "a causal mask with padding has a linear path"
    if 1 < T != S:
        assert attention_mask.query_offset == before
    value = torch.randn(2, 3, S, 2, dtype=torch.float64)
    wanted = expected_product(value, T, before, True, visible)
    real = visible.any(-1)[:, 0]  # rows that are padding see nothing; what they give is not used
    found = product(attention_mask, value)
    assert relative_error(found.transpose(1, 2)[real], wanted.transpose(1, 2)[real]) < 1e-6


def test_a_mask_row_for_all_queries():
    key_mask = torch.tensor([[True, True, False, True]])
    attention_mask = call(4, 4, key_mask[:, None, None, :], causal=False)
    assert torch.equal(attention_mask.key_mask, key_mask)


@pytest.mark.parametrize("kind", ["prefix", "hole", "per head"])
def test_other_visibility_is_exact_and_says_that_it_is_dense(kind):
    T = 8
    t, s = torch.arange(T)[:, None], torch.arange(T)[None, :]
    visible = {
        "hole": (s <= t) & ((t != 6) | (s != 3)),
        "prefix": (s <= t) | (s < 3),
        "per head": s <= t,
    }[kind][None, None].expand(2, 1, -1, -1)
    if kind == "per head":
        visible = visible.repeat(1, 3, 1, 1)
        visible[:, 1, 5, 2] = False
    with pytest.warns(UserWarning, match="quadratic"):
        attention_mask = call(T, T, visible)
    value = torch.randn(2, 3, T, 2, dtype=torch.float64)
    if kind == "per head":
        rows = [expected_product(value, T, 0, True, visible[:, h : h + 1])[:, h] for h in range(3)]
        expected = torch.stack(rows, 1)
    else:
        expected = expected_product(value, T, 0, True, visible)
    assert relative_error(product(attention_mask, value), expected) < 1e-6


def visible_with_blocks(text, before, behind, left, right):
    """Who sees whom: what lies behind, and the tokens of the same block, but no padding.

    A causal model's image tokens see all of their image, a prefix all of itself. By character: one of ".", or a block.
    Before the text are cached tokens, behind it empty slots of a static cache; each row has padding on the left and
    on the right, in tokens of the text.
    """
    T, S = len(text), before + len(text) + behind
    visible = torch.zeros(len(left), 1, T, S, dtype=torch.bool)
    for b in range(len(left)):
        real = range(left[b], before + T - right[b])
        for t in range(T):
            for s in real:
                together = text[t] != "." and s >= before and text[t] == text[s - before : s - before + 1]
                visible[b, 0, t, s] = s <= before + t or (together and before + t in real)
    return visible


def read_and_traced(value, mask, T):
    """P V of both ways to read a mask: with a look at its values, and in operators that a graph can hold."""
    S = value.shape[2]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RSA met")
        read = product(call(T, S, mask), value)
    return read, traced_forward(value, heads(value), AttentionMask(T, S, 0, True, unread_mask=mask), None)


def errors(value, mask, T, before, visible):
    """Of both, where queries are real."""
    wanted = expected_product(value, T, before, True, visible).transpose(1, 2)
    own = torch.arange(T)
    real = visible[:, 0, own, before + own]
    return [relative_error(found.transpose(1, 2)[real], wanted[real]) for found in read_and_traced(value, mask, T)]


@given(
    parts=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=4),
    before=st.integers(0, 6),
    behind=st.integers(0, 6),
    left=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    right=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    additive=st.booleans(),
)
@settings(max_examples=200)
def test_queries_that_see_ahead_stand_where_they_are(parts, before, behind, left, right, additive):
    text = "".join((name if is_block else ".") * n for name, (is_block, n) in zip("abcd", parts, strict=False))
    T, S = len(text), before + len(text) + behind
    right = tuple(min(n, T - 1) for n in right)
    left = tuple(min(n, before + T - 1 - r) for n, r in zip(left, right, strict=True))
    visible = visible_with_blocks(text, before, behind, left, right)
    mask = torch.where(visible, 0.0, MIN) if additive else visible
    value = torch.randn(2, 3, S, 2, dtype=torch.float64)
    reads = errors(value, mask, T, before, visible)
    # Where every query sees the last key that any sees, the mask is the same whatever of the tail is padding.
    last = int(visible.any(2)[:, 0].nonzero()[:, 1].max())
    told = bool((visible[:, 0].any(1)[:, last] & ~visible[:, 0, 0, last]).any())
    if told or min(right) == 0 or before == 0:
        assert max(reads) < 1e-6
    else:
        assert relative_error(*read_and_traced(value, mask, T)) < 1e-6


def test_all_queries_of_a_chunk_in_one_block_are_taken_for_real():
    """Two tokens behind six, then padding, or four tokens: the masks are the same, and the answer has to be one."""
    padded = visible_with_blocks("aaaa", 6, 5, (0, 0), (2, 2))
    full = visible_with_blocks("aaaa", 4, 7, (0, 0), (0, 0))
    assert torch.equal(padded, full)
    value = torch.randn(2, 3, 15, 2, dtype=torch.float64)
    assert max(errors(value, full, 4, 4, full)) < 1e-6


@pytest.mark.parametrize("text", ["...aaaa...", "aaaaaa....", ".aaabbb..."])
def test_the_farthest_that_any_query_sees_is_not_its_place(text, monkeypatch):
    visible = visible_with_blocks(text, 3, 7, (2, 0), (0, 2))
    value = torch.randn(2, 3, 20, 2, dtype=torch.float64)
    assert max(errors(value, visible, 10, 3, visible)) < 1e-6
    monkeypatch.setattr("rsa_hf.ops.mask.query_position", farthest)
    assert min(errors(value, visible.clone(), 10, 3, visible)) > 1e-2


@given(
    lengths=st.tuples(*[st.lists(st.integers(1, 9), min_size=1, max_size=6)] * 2),
    before=st.integers(0, 20),
    window=st.none() | st.integers(1, 9),
    causal=st.booleans(),
    additive=st.booleans(),
)
def test_packed_documents_and_windows(lengths, before, window, causal, additive):
    # Two rows of documents with padding behind them; the queries may be the last ones only.
    S = max(sum(row) for row in lengths)
    numbers, key_mask = torch.full((2, S), -1), torch.zeros(2, S, dtype=torch.bool)
    for b, row in enumerate(lengths):
        end = sum(row)
        numbers[b, :end] = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        key_mask[b, :end] = True
    offset = before % S
    T = S - offset
    lags = (offset + torch.arange(T))[:, None] - torch.arange(S)
    seen = (numbers[:, offset:, None] == numbers[:, None, :]) & key_mask[:, None]
    seen = seen & (lags.abs() < (window or S)) & ((lags >= 0) | (not causal))
    visible = seen[:, None]
    mask = torch.where(visible, 0.0, MIN) if additive else visible
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="RSA met")  # all of this has a linear path
        attention_mask = call(T, S, mask, causal=causal)
    value = torch.randn(2, 3, S, 2, dtype=torch.float64)
    poisoned = torch.where(seen.any(1)[:, None, :, None], value, torch.nan)
    found, wanted = product(attention_mask, poisoned), expected_product(value, T, offset, causal, visible)
    rows = seen.any(-1)  # queries that see nothing are padding; what they give is not used
    assert relative_error(found.transpose(1, 2)[rows], wanted.transpose(1, 2)[rows]) < 1e-6


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_one_mask_of_packed_documents_serves_all_rows(window, causal):
    number, lags = torch.arange(40) // 9, torch.arange(40)[:, None] - torch.arange(40)
    seen = (number[:, None] == number) & (lags.abs() < (window or 40)) & ((lags >= 0) | (not causal))
    visible = seen[None, None]
    attention_mask = call(40, 40, visible, causal=causal)
    assert attention_mask.visible is None  # a linear path
    value = torch.randn(2, 3, 40, 2, dtype=torch.float64)
    wanted = expected_product(value, 40, 0, causal, visible)
    assert relative_error(product(attention_mask, value), wanted) < 1e-6


def test_missing_mask():
    # (T, S, causal, aligned_top_left) → offset: a single query sees every key; sdpa aligns several at the top left.
    assert call(6, 6, None).query_offset == 0
    assert call(1, 6, None).query_offset == 5
    assert call(4, 6, None).query_offset == 0
    assert call(4, 6, None, aligned_top_left=False).query_offset == 2
    assert call(4, 6, None, causal=False).query_offset == 2


def test_two_dimensional_masks_and_windows_of_flash_attention():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    attention_mask = call(4, 4, mask, aligned_top_left=False)
    assert torch.equal(attention_mask.key_mask, mask.bool())
    attention_mask = call(4, 6, None, aligned_top_left=False, sliding_window=3)
    t, s = 2 + torch.arange(4)[:, None], torch.arange(6)[None, :]
    value = torch.randn(2, 3, 6, 2, dtype=torch.float64)
    visible = ((s <= t) & (t - s < 3))[None, None].expand(2, -1, -1, -1)
    assert relative_error(product(attention_mask, value), expected_product(value, 4, 2, True, visible)) < 1e-6


def test_a_mask_that_ends_before_the_static_cache_does():
    # Three queries at the end of five tokens, the first of which is padding in one row; two slots are empty.
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    attention_mask = call(3, 7, mask, aligned_top_left=False)
    visible = causal_visible(3, 7, 2, torch.nn.functional.pad(mask, (0, 2)).bool())
    value = torch.randn(2, 3, 7, 2, dtype=torch.float64)
    assert relative_error(product(attention_mask, value), expected_product(value, 3, 2, True, visible)) < 1e-6


def test_position_bias_in_the_mask_is_not_taken_for_hiding():
    bias = torch.randn(1, 3, 5, 5) * 50
    mask = torch.where(torch.ones(5, 5).tril().bool(), bias, MIN)
    attention_mask = call(5, 5, mask)
    assert (attention_mask.visible, attention_mask.key_mask) == (None, None)
    assert call(5, 5, torch.where(torch.ones(5, 5).tril().bool(), 0.0, -10_000.0)[None, None]).visible is None


def test_one_mask_is_read_once(monkeypatch):
    import rsa_hf.ops.mask as module

    read, calls = module._read_mask, []
    monkeypatch.setattr(module, "_read_mask", lambda *args: calls.append(1) or read(*args))
    mask = torch.ones(2, 1, 5, 5).tril().bool()
    first = call(5, 5, mask)
    assert call(5, 5, mask) is first
    assert len(calls) == 1
    mask[0, 0, :, 0] = False  # written to in place: what was read before no longer holds
    assert call(5, 5, mask).key_mask is not None
    assert len(calls) == 2
    call(5, 5, mask.clone())
    assert len(calls) == 3
    del mask
    assert not module._memory.known  # nothing is kept of a mask that is gone


def test_one_mask_is_read_once_under_inference_mode(monkeypatch):
    import rsa_hf.ops.mask as module

    read, calls = module._read_mask, []
    monkeypatch.setattr(module, "_read_mask", lambda *args: calls.append(1) or read(*args))
    with torch.inference_mode():
        mask = torch.ones(2, 1, 5, 5).tril().bool()
        first = call(5, 5, mask)
        assert call(5, 5, mask) is first
        mask[0, 0, :, 0] = False  # no version counter tells of it
        assert call(5, 5, mask).key_mask is not None
        assert len(calls) == 2


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (object(), TypeError, "mask of type object.*sdpa"),
        (torch.ones(2, 5, 5), ValueError, r"\(2, 5, 5\)"),
        (torch.ones(2, 3), ValueError, r"\(2, 3\)"),
        (torch.ones(2, 1, 4, 5), ValueError, "5 queries"),
        (torch.ones(2, 1, 5, 3), ValueError, "5 keys"),
    ],
)
def test_masks_that_cannot_be_read(mask, error, message):
    with pytest.raises(error, match=message):
        call(5, 5, mask)


def test_a_compiled_graph_does_not_guess_where_the_queries_stand():
    # Two queries at positions 3 and 4 of a cache with empty slots behind: not the last two of its eight.
    visible = torch.arange(8)[None, :] <= torch.tensor([[3], [4]])
    value = torch.randn(2, 3, 8, 2, dtype=torch.float64)
    mask = visible[None, None].expand(2, -1, -1, -1).contiguous()

    def run(mask):
        return product(call(2, 8, mask), value)

    expected = expected_product(value, 2, 3, True, mask)
    assert relative_error(torch.compile(run, backend="eager")(mask), expected) < 1e-6


@pytest.mark.parametrize("told_by", ["cu_seq_lens_q", "position_ids"])
@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_flash_attention(told_by, causal):
    lengths = torch.tensor([3, 1, 5])
    number = torch.arange(3).repeat_interleave(lengths)
    keywords = {
        "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 3, 4, 9], dtype=torch.int32)},
        "position_ids": {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]},
    }[told_by]
    query, value = torch.empty(1, 3, 9, 4), torch.randn(1, 3, 9, 2, dtype=torch.float64)
    documents = flash_segment_ids(query, value, keywords)
    attention_mask = read_attention_mask(
        query, value, None, causal=causal, aligned_top_left=False, segment_ids=documents
    )
    visible = number[:, None] == number[None, :]
    visible = (visible & torch.ones(9, 9).tril().bool() if causal else visible)[None, None]
    assert relative_error(product(attention_mask, value), expected_product(value, 9, 0, causal, visible)) < 1e-6


def test_one_document_under_flash_attention():
    query = torch.empty(1, 3, 9, 4)
    assert flash_segment_ids(query, query, {"position_ids": torch.arange(9)[None]}) is None
    assert flash_segment_ids(query, query, {"position_ids": torch.arange(9)[None] + 5}) is None
    begins_anew = torch.cat([torch.arange(2, 6), torch.arange(2, 7)])[None]  # RoBERTa's positions begin at 2
    assert flash_segment_ids(query, query, {"position_ids": begins_anew}).tolist() == [[1] * 4 + [2] * 5]
    assert flash_segment_ids(query[:, :, :1], query, {"position_ids": torch.tensor([[0]])}) is None
    assert flash_segment_ids(query, query, {}) is None
    with pytest.raises(NotImplementedError, match="2 queries and 9 keys.*sdpa"):
        flash_segment_ids(query[:, :, :2], query, {"cu_seq_lens_q": torch.tensor([0, 2])})


def test_positions_of_packed_documents_are_read_once(monkeypatch):
    import rsa_hf.integration.attention as module

    read, calls = module._segment_ids_of_positions, []
    monkeypatch.setattr(module, "_segment_ids_of_positions", lambda positions: calls.append(1) or read(positions))
    query, positions = torch.empty(1, 2, 5, 3), torch.tensor([[0, 1, 0, 1, 2]])
    first = flash_segment_ids(query, query, {"position_ids": positions})
    assert first.tolist() == [[1, 1, 2, 2, 2]]
    assert flash_segment_ids(query, query, {"position_ids": positions}) is first
    assert len(calls) == 1
    positions[0, 2:] += 2  # written to in place: one document now
    assert flash_segment_ids(query, query, {"position_ids": positions}) is None
    assert len(calls) == 2
