"""Sliding windows in linear time: against dense P with a mask, values and every gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.agreement import DILATION, KINDS, assert_close, dense_product, draw, values_and_gradients
from rsa_hf import rem_product


def visible_in(window, T, S, causal, numbers=None, key_mask=None):
    lags = (S - T + torch.arange(T))[:, None] - torch.arange(S)
    visible = ((lags < window) & (lags > -window) & ((lags >= 0) | (not causal)))[None]
    if numbers is not None:
        visible = visible & (numbers[:, S - T :, None] == numbers[:, None])
    if key_mask is not None:
        visible = visible & key_mask[:, None]
    return visible[:, None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 59, 60, 61, 200])
def test_agrees_with_a_mask(window, causal):
    T = 60
    tensors = draw(T)
    found = values_and_gradients(
        lambda v, r, a: rem_product(v, KINDS, r, a, DILATION, causal=causal, window=window), tensors
    )
    visible = visible_in(window, T, T, causal)
    dense = values_and_gradients(
        lambda v, r, a: dense_product(v, KINDS, r, a, DILATION, T, 0, causal, visible), tensors
    )
    assert_close(found, dense)


def test_the_window_matters():
    value, decay, theta = draw(60)
    narrow = rem_product(value, KINDS, decay, theta, window=7)
    assert float((rem_product(value, KINDS, decay, theta) - narrow).detach().abs().max()) > 0.1
    assert float((rem_product(value, KINDS, decay, theta, window=8) - narrow).detach().abs().max()) > 0.1


def test_nothing_cancels_however_slow_the_decay():
    # Taking the full scan of float32 minus what has left the window would be off by 10 % here.
    T, window = 3000, 5
    value = torch.randn(1, 1, T, 2, dtype=torch.float64)
    decay = torch.tensor([1 - 1e-6], dtype=torch.float64)
    expected = rem_product(value, "regular", decay, window=window)
    found = rem_product(value.float(), "regular", decay.float(), window=window)
    assert float((found - expected).abs().max()) < 1e-5


@given(
    S=st.integers(1, 100),
    queries=st.integers(1, 100),
    window=st.integers(1, 40),
    causal=st.booleans(),
    cuts=st.sets(st.integers(1, 99), max_size=6),
    hidden=st.sets(st.integers(0, 99), max_size=4),
    dilation=st.tuples(*[st.integers(1, 9)] * 6),
    seed=st.integers(0, 10_000),
)
def test_random_windows_over_documents(S, queries, window, causal, cuts, hidden, dilation, seed):
    torch.manual_seed(seed)
    T = min(queries, S)
    numbers = torch.zeros(2, S, dtype=torch.long)
    for cut in cuts:
        numbers[0, cut:] += 1
    key_mask = torch.ones(2, S, dtype=torch.bool)
    key_mask[1, [place for place in hidden if place < S]] = False
    tensors = draw(T, S, D=2)
    masks = {"documents": numbers, "key_mask": key_mask, "window": window}
    found = values_and_gradients(
        lambda v, r, a: rem_product(v, KINDS, r, a, dilation, query_length=T, causal=causal, **masks), tensors
    )
    visible = visible_in(window, T, S, causal, numbers, key_mask)
    dense = values_and_gradients(
        lambda v, r, a: dense_product(v, KINDS, r, a, dilation, T, S - T, causal, visible), tensors
    )
    assert_close(found, dense)


def test_grouped_values():
    value, decay, theta = draw(40)
    shared = value[:, :2].detach().requires_grad_()
    found = values_and_gradients(
        lambda v, r, a: rem_product(v, KINDS, r, a, DILATION, groups=4, window=9), [shared, decay, theta]
    )
    copied = values_and_gradients(
        lambda v, r, a: rem_product(v.repeat_interleave(4, 1), KINDS, r, a, DILATION, window=9), [shared, decay, theta]
    )
    assert_close(found, copied)


def test_a_window_without_the_query_itself_is_refused():
    value, decay, theta = draw(5)
    with pytest.raises(ValueError, match="window 0.*≥ 1"):
        rem_product(value, KINDS, decay, theta, window=0)
