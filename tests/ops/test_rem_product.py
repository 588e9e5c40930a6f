"""P V: the chunked path against dense P, against the recurrent network, against a double loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.agreement import DILATION, KINDS, assert_close, dense_product, draw, values_and_gradients
from references import double_loop, lag_weight, recurrence, relative_error
from rsa_hf import rem_product
from rsa_hf.ops import chunked
from rsa_hf.rem import rem_matrix


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 2, 5, 17, 29])
def test_agrees_with_double_loop(T, causal):
    tensors = draw(T)
    found = values_and_gradients(lambda v, r, a: rem_product(v, KINDS, r, a, DILATION, causal=causal), tensors)
    looped = values_and_gradients(lambda v, r, a: double_loop(v, KINDS, r, a, DILATION, T, 0, causal), tensors)
    dense = values_and_gradients(lambda v, r, a: dense_product(v, KINDS, r, a, DILATION, T, 0, causal), tensors)
    assert_close(found, looped)
    assert_close(dense, looped)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [63, 64, 65, 127, 200, 300])
def test_agrees_with_the_recurrent_network(T, causal):
    tensors = draw(T)
    found = values_and_gradients(lambda v, r, a: rem_product(v, KINDS, r, a, DILATION, causal=causal), tensors)
    stepped = values_and_gradients(lambda v, r, a: recurrence(v, KINDS, r, a, DILATION, causal), tensors)
    dense = values_and_gradients(lambda v, r, a: dense_product(v, KINDS, r, a, DILATION, T, 0, causal), tensors)
    assert_close(found, stepped)
    assert_close(dense, stepped)


def test_agrees_with_the_recurrent_network_over_many_chunks():
    # Long enough for the states of chunks to be chunked again (64 · 64 steps), and with enough numbers in a head for
    # the derivatives of its rates to be summed head by head.
    tensors = draw(4500, B=1, D=4)
    assert chunked.SHORT < 4500 * 4
    found = values_and_gradients(lambda v, r, a: rem_product(v, KINDS, r, a, DILATION), tensors)
    stepped = values_and_gradients(lambda v, r, a: recurrence(v, KINDS, r, a, DILATION, True), tensors)
    assert_close(found, stepped)


@pytest.mark.parametrize(("T", "S"), [(1, 2), (1, 77), (1, 300), (5, 6), (13, 90), (64, 130), (100, 171), (7, 9)])
def test_keys_before_the_queries(T, S):
    tensors = draw(T, S)
    found = values_and_gradients(lambda v, r, a: rem_product(v, KINDS, r, a, DILATION, query_length=T), tensors)
    dense = values_and_gradients(lambda v, r, a: dense_product(v, KINDS, r, a, DILATION, T, S - T, True), tensors)
    assert_close(found, dense)
    if T * S < 1000:
        looped = values_and_gradients(lambda v, r, a: double_loop(v, KINDS, r, a, DILATION, T, S - T, True), tensors)
        assert_close(found, looped)
    # The same rows as in one long run: cached and uncached agree.
    whole = rem_product(*tensors[:1], KINDS, *tensors[1:], DILATION)
    assert relative_error(found[0], whole[:, :, S - T :]) <= 1e-10


@pytest.mark.parametrize("offset", [0, 3, 20])
def test_empty_slots_behind_the_queries(offset):
    # A static cache: slots behind the last query are not yet written. NaN there must not reach the output.
    T, S = 9, 40
    value, decay, theta = draw(T, S)
    expected = double_loop(value, KINDS, decay, theta, DILATION, T, offset, True)
    poisoned = value.detach().clone()
    poisoned[:, :, offset + T :] = math.nan
    found = rem_product(poisoned, KINDS, decay, theta, DILATION, query_length=T, query_offset=offset)
    assert relative_error(found, expected) <= 1e-10


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [6, 70])
def test_dilation_longer_than_the_text(T, causal):
    value, decay, theta = draw(T)
    for d in (T - 1, T, T + 3, 10 * T):
        found = rem_product(value, KINDS, decay, theta, d, causal=causal)
        dense = rem_matrix(KINDS, decay, theta, d, query_length=T, causal=causal) @ value
        assert relative_error(found, dense) <= 1e-10
        if d >= T:
            assert torch.count_nonzero(found) == 0


@pytest.mark.parametrize("rate", [1 - 1e-6, -(1 - 1e-6), 0.0, 1e-3, -0.5])
@pytest.mark.parametrize("causal", [True, False])
def test_extreme_rates(rate, causal):
    T = 150
    value = torch.randn(2, 1, T, 3, dtype=torch.float64, requires_grad=True)
    decay = torch.tensor([rate], dtype=torch.float64, requires_grad=True)
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    for d in (1, 4):
        tensors = [value, decay, theta]
        found = values_and_gradients(lambda v, r, a, d=d: rem_product(v, "regular", r, a, d, causal=causal), tensors)
        stepped = values_and_gradients(lambda v, r, a, d=d: recurrence(v, ["regular"], r, a, [d], causal), tensors)
        assert_close(found, stepped)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S"), [(33, 33), (20, 41)])
def test_padding_contributes_nothing(T, S, causal):
    value, decay, theta = draw(T, S)
    key_mask = torch.ones(2, S, dtype=torch.bool)
    key_mask[0, :5] = False
    key_mask[1, -4:] = False
    visible = key_mask[:, None, None, :].expand(-1, -1, T, -1)
    expected = double_loop(value, KINDS, decay, theta, DILATION, T, S - T, causal, visible)
    poisoned = torch.where(key_mask[:, None, :, None], value, torch.nan)
    found = rem_product(poisoned, KINDS, decay, theta, DILATION, query_length=T, causal=causal, key_mask=key_mask)
    assert relative_error(found, expected) <= 1e-10


@pytest.mark.parametrize("causal", [True, False])
def test_any_visibility(causal):
    T = 21
    value, decay, theta = draw(T)
    visible = torch.rand(2, 1, T, T) < 0.6
    expected = double_loop(value, KINDS, decay, theta, DILATION, T, 0, causal, visible)
    assert (
        relative_error(rem_product(value, KINDS, decay, theta, DILATION, causal=causal, visible=visible), expected)
        <= 1e-10
    )


def test_grouped_values():
    value, decay, theta = draw(75)
    shared = value[:, :2].detach().requires_grad_()
    found = values_and_gradients(
        lambda v, r, a: rem_product(v, KINDS, r, a, DILATION, groups=4), [shared, decay, theta]
    )
    copied = values_and_gradients(
        lambda v, r, a: rem_product(v.repeat_interleave(4, 1), KINDS, r, a, DILATION), [shared, decay, theta]
    )
    assert_close(found, copied)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_half_precision(dtype, causal):
    value, decay, theta = draw(200)
    expected = rem_product(value, KINDS, decay, theta, DILATION, causal=causal)
    half = value.detach().to(dtype)
    found = rem_product(half, KINDS, decay.float(), theta.float(), DILATION, causal=causal)
    assert found.dtype == torch.float32
    assert relative_error(found, expected) <= 1e-2
    with torch.autocast("cpu", torch.bfloat16):
        autocast = rem_product(half, KINDS, decay.float(), theta.float(), DILATION, causal=causal)
    assert torch.equal(autocast, found)


@pytest.mark.parametrize("window", [None, 30])
def test_a_backward_pass_inside_autocast(window):
    tensors = [tensor.detach().float().requires_grad_() for tensor in draw(200)]

    def product(v, r, a):
        return rem_product(v, KINDS, r, a, DILATION, window=window)

    expected = values_and_gradients(product, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found = values_and_gradients(product, tensors)
    assert_close(found, expected, 1e-6)


@given(
    T=st.integers(1, 90),
    before=st.integers(0, 90),
    causal=st.booleans(),
    heads=st.lists(st.tuples(st.sampled_from(("regular", "cos", "sin")), st.integers(1, 7)), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_random_geometries(T, before, causal, heads, seed):
    S = T + before
    generator = torch.Generator().manual_seed(seed)
    kinds, dilation = zip(*heads, strict=True)
    tensors = [
        torch.randn(2, len(kinds), S, 2, dtype=torch.float64, generator=generator),
        torch.rand(len(kinds), dtype=torch.float64, generator=generator) * 2 - 1,
        torch.randn(len(kinds), dtype=torch.float64, generator=generator) * 2,
    ]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    found = values_and_gradients(
        lambda v, r, a: rem_product(v, kinds, r, a, dilation, query_length=T, causal=causal), tensors
    )
    dense = values_and_gradients(lambda v, r, a: dense_product(v, kinds, r, a, dilation, T, before, causal), tensors)
    assert_close(found, dense)


def slip_in_the_cosine(kind, rate, angle, lag):
    return rate**lag * torch.cos(angle) if kind == "cos" else lag_weight(kind, rate, angle, lag)


def lag_matrix(kind, rate, angle, lag):
    return torch.tensor(float(lag), dtype=rate.dtype)


def long_lags_switched_on(kind, rate, angle, lag):
    return lag_weight(kind, rate, angle, lag if lag < 10 else 0)


@pytest.mark.parametrize("broken", [slip_in_the_cosine, lag_matrix, long_lags_switched_on])
def test_a_wrong_rem_is_caught(broken):
    # The errors that public re-implementations are known to make.
    value, decay, theta = draw(17)
    found = rem_product(value, KINDS, decay, theta, DILATION)
    wrong = double_loop(value, KINDS, decay, theta, DILATION, 17, 0, True, weight=broken)
    assert relative_error(found, wrong) > 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": "tangent"}, "tangent.*regular, cos, sin"),
        ({"dilation": 0}, "dilation 0"),
        ({"decay": [0.1, 0.2]}, "one per head"),
        ({"kinds": ["cos"] * 9}, "9 heads do not fit 6"),
        ({"query_length": 8}, "between 0 and"),
        ({"query_length": 3, "query_offset": 5}, "between 0 and"),
    ],
)
def test_bad_arguments(arguments, message):
    keywords = {"kinds": ["regular"] * 6, "decay": 0.5, "theta": 0.0, "dilation": 1, **arguments}
    with pytest.raises(ValueError, match=message):
        rem_product(torch.randn(1, 6, 7, 2), **keywords)


def test_value_needs_four_dimensions():
    with pytest.raises(ValueError, match=r"\[B, H, S, D\]"):
        rem_product(torch.randn(6, 7, 2), "regular", 0.5)
