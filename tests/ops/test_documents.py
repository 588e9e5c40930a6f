"""Packed documents in linear time: against dense P with a mask, values and every gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.agreement import KINDS, assert_close, dense_product, draw, values_and_gradients
from rsa_hf import rem_product
from rsa_hf.ops.chunk_layout import PackedLayout

LENGTHS = ([1, 1, 1, 40, 2, 30, 5], [80], [3, 77], [20, 20, 20, 20])


def numbers_of(rows):
    # Numbers need not be in order, only differ from neighbour to neighbour.
    return torch.stack([(torch.arange(len(row)) * 7 % 5).repeat_interleave(torch.tensor(row)) for row in rows])


def dense_with(numbers, T, causal, key_mask=None):
    S = numbers.shape[1]
    run = torch.cat([torch.zeros(len(numbers), 1), (numbers[:, 1:] != numbers[:, :-1]).cumsum(1)], 1)
    visible = run[:, S - T :, None] == run[:, None, :]
    if key_mask is not None:
        visible = visible & key_mask[:, None]
    return lambda v, r, a, dilation: dense_product(v, KINDS, r, a, dilation, T, S - T, causal, visible[:, None])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dilation", [(1,) * 6, (1, 1, 2, 3, 5, 5), (7, 19, 30, 79, 80, 200)])
def test_agrees_with_a_mask(dilation, causal):
    numbers = numbers_of(LENGTHS)
    tensors = draw(80, B=len(LENGTHS))
    found = values_and_gradients(
        lambda v, r, a: rem_product(v, KINDS, r, a, dilation, causal=causal, documents=numbers), tensors
    )
    dense = dense_with(numbers, 80, causal)
    assert_close(found, values_and_gradients(lambda v, r, a: dense(v, r, a, dilation), tensors))


def test_the_mask_matters():
    # The control: the same rows without their documents are something else.
    numbers = numbers_of(LENGTHS)
    value, decay, theta = draw(80, B=len(LENGTHS))
    whole = rem_product(value, KINDS, decay, theta)
    packed = rem_product(value, KINDS, decay, theta, documents=numbers)
    assert float((whole - packed).detach().abs().max()) > 0.1
    # The first document of a row does not know the difference.
    assert torch.allclose(whole[2, :, :3], packed[2, :, :3])


def test_nothing_passes_from_one_document_to_another():
    numbers = numbers_of(LENGTHS)
    value, decay, theta = (tensor.detach() for tensor in draw(80, B=len(LENGTHS)))
    poisoned = value.clone()
    poisoned[3, :, 20:40] = torch.nan
    found = rem_product(poisoned, KINDS, decay, theta, documents=numbers)
    clean = rem_product(value, KINDS, decay, theta, documents=numbers)
    outside = torch.ones(80, dtype=torch.bool)
    outside[20:40] = False
    assert torch.equal(found[3][:, outside], clean[3][:, outside])
    assert bool(found[3][:, 21:40].isnan().all())


@given(
    rows=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=3),
    queries=st.integers(1, 120),
    hidden=st.sets(st.integers(0, 119), max_size=4),
    causal=st.booleans(),
    dilation=st.tuples(*[st.integers(1, 9)] * 6),
    seed=st.integers(0, 10_000),
)
def test_random_documents(rows, queries, hidden, causal, dilation, seed):
    torch.manual_seed(seed)
    S = max(sum(row) for row in rows)
    numbers = numbers_of([[*row, S - sum(row)] for row in rows])
    T = min(queries, S)
    key_mask = torch.ones(len(rows), S, dtype=torch.bool)
    key_mask[0, [place for place in hidden if place < S]] = False
    tensors = draw(T, S, B=len(rows), D=2)

    def product(v, r, a):
        masks = {"documents": numbers, "key_mask": key_mask}
        return rem_product(v, KINDS, r, a, dilation, query_length=T, causal=causal, **masks)

    dense = dense_with(numbers, T, causal, key_mask)
    found = values_and_gradients(product, tensors)
    assert_close(found, values_and_gradients(lambda v, r, a: dense(v, r, a, dilation), tensors))


@pytest.mark.parametrize("dilation", [1, 5, 300])
def test_memory_stays_linear(dilation):
    # Many short documents beside a long one: columns at most a constant times the positions.
    from rsa_hf.ops.mask import PackedSegments

    numbers = numbers_of([[*[3] * 500, 1000], [*[1] * 2000, 500]])
    layout = PackedLayout(PackedSegments(numbers), 4, dilation, None)
    assert layout.hidden.numel() <= 4 * numbers.numel()
