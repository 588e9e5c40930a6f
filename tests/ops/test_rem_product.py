"""P V in plain PyTorch and in C++, against dense P, the recurrent network and a double loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.agreement import DILATION, KINDS, assert_agrees, assert_close, draw, values_and_gradients
from references import double_loop, lag_weight, relative_error
from rsa_hf import rem_product
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.reference import chunked_minimal, dense_rem_product, recurrent_rem_product


@pytest.fixture(autouse=True, params=["pytorch", "cpp"])
def backend(request, monkeypatch):
    if request.param == "cpp" and isinstance(library(), str):
        pytest.skip(library())
    monkeypatch.setenv("RSA_HF_BACKEND", request.param)


both_directions = pytest.mark.parametrize("causal", [True, False])


def looped(value, kinds, decay, theta, dilation, *, query_length=None, causal=True):
    """`double_loop` with the arguments of `rem_product`."""
    S = value.shape[2]
    T = S if query_length is None else query_length
    return double_loop(value, kinds, decay, theta, dilation, T, S - T, causal)


@both_directions
@pytest.mark.parametrize("T", [1, 2, 5, 17, 29])
def test_short_texts_agree_with_all_references(T, causal):
    for reference in (looped, dense_rem_product, recurrent_rem_product):
        assert_agrees(draw(T), reference, causal=causal)


@both_directions
@pytest.mark.parametrize("T", [63, 64, 65, 127, 200, 300])
def test_texts_of_some_chunks_agree_with_the_recurrent_network(T, causal):
    assert_agrees(draw(T), recurrent_rem_product, causal=causal)


def test_texts_of_many_chunks_agree_with_the_recurrent_network():
    # The states of chunks are chunked again, and those of these chunks too.
    assert_agrees(draw(4500, B=1, D=4), recurrent_rem_product)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 70])
def test_the_minimal_form_agrees(T):
    tensors = draw(T)
    found = values_and_gradients(lambda v, r, a: chunked_minimal(v, KINDS, r, a), tensors)
    assert_close(found, values_and_gradients(lambda v, r, a: rem_product(v, KINDS, r, a), tensors))


@pytest.mark.parametrize(("T", "S"), [(1, 2), (1, 77), (1, 300), (5, 6), (13, 90), (64, 130), (100, 171), (7, 9)])
def test_keys_before_the_queries_count(T, S):
    assert_agrees(draw(T, S), query_length=T)


@pytest.mark.parametrize("offset", [0, 3, 20])
def test_empty_slots_behind_the_queries_are_not_read(offset):
    # In a static cache, slots behind the last query are not yet written. NaN there must not reach the output.
    tensors = draw(40)
    tensors[0].data[:, :, offset + 19 :] = math.nan
    assert_agrees(tensors, query_length=19, query_offset=offset)


@both_directions
@pytest.mark.parametrize("T", [6, 70])
def test_a_dilation_longer_than_the_text_gives_zero(T, causal):
    tensors = draw(T)
    for d in (T - 1, T, T + 3, 10 * T):
        assert_agrees(tensors, dilation=(d,) * 6, causal=causal)
        if d >= T:
            assert torch.count_nonzero(rem_product(tensors[0], KINDS, *tensors[1:], d, causal=causal)) == 0


@pytest.mark.parametrize("rate", [1 - 1e-6, -(1 - 1e-6), 0.0, 1e-3, -0.5])
@both_directions
def test_extreme_rates_agree_with_the_recurrent_network(rate, causal):
    value = torch.randn(2, 1, 150, 3, dtype=torch.float64)
    tensors = [value, torch.tensor([rate], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    for d in (1, 4):
        assert_agrees(tensors, recurrent_rem_product, ("regular",), (d,), causal=causal)


@both_directions
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("T", "S"), [(33, 33), (20, 41)])
def test_padding_contributes_nothing(T, S, window, causal):
    tensors = draw(T, S)
    key_mask = torch.ones(2, S, dtype=torch.bool)
    key_mask[0, :5] = False
    key_mask[1, -4:] = False
    tensors[0].data[~key_mask[:, None].expand(-1, 6, -1)] = math.nan
    assert_agrees(tensors, query_length=T, causal=causal, key_mask=key_mask, window=window)


@both_directions
def test_any_visible_mask_is_followed(causal):
    assert_agrees(draw(21), causal=causal, visible=torch.rand(2, 1, 21, 21) < 0.6)


@pytest.mark.parametrize(
    "masks",
    [{}, {"window": 9}, {"documents": torch.arange(75)[None] // 13}, {"visible": torch.rand(1, 1, 75, 75) < 0.6}],
    ids=["scan", "window", "documents", "dense"],
)
def test_grouped_values_agree_with_dense_p(masks):
    value, decay, theta = draw(75)
    assert_agrees([value[:, :2].detach().requires_grad_(), decay, theta], groups=4, **masks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@both_directions
def test_half_precision_is_computed_in_float32(dtype, causal):
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
def test_a_backward_pass_in_cpp_ignores_autocast(window, monkeypatch):
    monkeypatch.setenv("RSA_HF_BACKEND", "" if isinstance(library(), str) else "cpp")
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
def test_random_lengths_and_heads_agree_with_dense_p(T, before, causal, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    kinds, dilation = zip(*heads, strict=True)
    tensors = [
        torch.randn(2, len(kinds), T + before, 2, dtype=torch.float64, generator=generator),
        torch.rand(len(kinds), dtype=torch.float64, generator=generator) * 2 - 1,
        torch.randn(len(kinds), dtype=torch.float64, generator=generator) * 2,
    ]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    assert_agrees(tensors, kinds=kinds, dilation=dilation, query_length=T, causal=causal)


# --- sliding windows ------------------------------------------------------------------------------------------------


@both_directions
@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 59, 60, 61, 200])
def test_windows_agree_with_dense_p(window, causal):
    assert_agrees(draw(60), causal=causal, window=window)


def test_a_window_loses_no_digits_at_a_slow_decay():
    # Subtracting what has left the window from the full scan in float32 is off by 10 % here.
    value = torch.randn(1, 1, 3000, 2, dtype=torch.float64)
    decay = torch.tensor([1 - 1e-6], dtype=torch.float64)
    expected = rem_product(value, "regular", decay, window=5)
    found = rem_product(value.float(), "regular", decay.float(), window=5)
    assert float((found - expected).abs().max()) < 1e-5


# --- packed documents -----------------------------------------------------------------------------------------------

LENGTHS = ([1, 1, 1, 40, 2, 30, 5], [80], [3, 77], [20, 20, 20, 20])


def numbers_of(rows):
    # Document numbers need no order; neighbours differ.
    return torch.stack([(torch.arange(len(row)) * 7 % 5).repeat_interleave(torch.tensor(row)) for row in rows])


@both_directions
@pytest.mark.parametrize("dilation", [(1,) * 6, (1, 1, 2, 3, 5, 5), (7, 19, 30, 79, 80, 200)])
@pytest.mark.parametrize("reference", [dense_rem_product, recurrent_rem_product])
def test_documents_agree_with_both_references(dilation, causal, reference):
    tensors = draw(80, B=len(LENGTHS))
    assert_agrees(tensors, reference, dilation=dilation, causal=causal, documents=numbers_of(LENGTHS))


def test_nothing_passes_from_one_document_to_another():
    numbers = numbers_of(LENGTHS)
    value, decay, theta = (tensor.detach() for tensor in draw(80, B=len(LENGTHS)))
    poisoned = value.clone()
    poisoned[3, :, 20:40] = 1e6
    found = rem_product(poisoned, KINDS, decay, theta, documents=numbers)
    clean = rem_product(value, KINDS, decay, theta, documents=numbers)
    outside = torch.ones(80, dtype=torch.bool)
    outside[20:40] = False
    assert torch.equal(found[3][:, outside], clean[3][:, outside])
    assert float((found - clean)[3][:, 21:40].abs().amax((0, 2)).min()) > 1


@given(
    rows=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=3),
    queries=st.integers(1, 120),
    window=st.none() | st.integers(1, 40),
    hidden=st.sets(st.integers(0, 119), max_size=4),
    causal=st.booleans(),
    dilation=st.tuples(*[st.integers(1, 9)] * 6),
    seed=st.integers(0, 10_000),
)
def test_random_documents_windows_and_padding_agree_with_dense_p(
    rows, queries, window, hidden, causal, dilation, seed
):
    torch.manual_seed(seed)
    S = max(sum(row) for row in rows)
    numbers = numbers_of([[*row, S - sum(row)] for row in rows])
    key_mask = torch.ones(len(rows), S, dtype=torch.bool)
    key_mask[0, [place for place in hidden if place < S]] = False
    T = min(queries, S)
    masks = {"documents": numbers, "key_mask": key_mask, "window": window}
    assert_agrees(draw(T, S, B=len(rows), D=2), dilation=dilation, query_length=T, causal=causal, **masks)


# --- controls and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("masks", "broken"),
    [
        ({"window": 7}, {}),
        ({"window": 7}, {"window": 8}),
        ({"documents": numbers_of(LENGTHS)}, {}),
        ({"key_mask": torch.arange(80)[None] > 3}, {}),
        ({}, {"causal": False}),
    ],
)
def test_an_ignored_mask_is_caught(masks, broken):
    value, decay, theta = draw(80, B=len(LENGTHS))
    found = rem_product(value, KINDS, decay, theta, **masks)
    assert relative_error(found, dense_rem_product(value, KINDS, decay, theta, (1,) * 6, **broken)) > 1e-2


def cosine_without_lag(kind, rate, angle, lag):
    return rate**lag * torch.cos(angle) if kind == "cos" else lag_weight(kind, rate, angle, lag)


def lag_matrix(kind, rate, angle, lag):
    return torch.tensor(float(lag), dtype=rate.dtype)


def long_lags_are_one(kind, rate, angle, lag):
    return lag_weight(kind, rate, angle, lag if lag < 10 else 0)


@pytest.mark.parametrize("broken", [cosine_without_lag, lag_matrix, long_lags_are_one])
def test_a_wrong_rem_is_caught(broken):
    # Known errors of public re-implementations.
    value, decay, theta = draw(17)
    found = rem_product(value, KINDS, decay, theta, DILATION)
    wrong = double_loop(value, KINDS, decay, theta, DILATION, 17, 0, True, weight=broken)
    assert relative_error(found, wrong) > 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": "tangent"}, "tangent.*regular, cos, sin"),
        ({"dilation": 0}, "dilation=0"),
        ({"decay": [0.1, 0.2]}, "one per head"),
        ({"kinds": ["cos"] * 9}, "9 heads and 6 value heads"),
        ({"query_length": 8}, "query_offset from 0 to 7"),
        ({"query_length": 3, "query_offset": 5}, "query_offset from 0 to 7"),
        ({"window": 0}, "window=0.*≥ 1"),
        ({"value": torch.randn(6, 7, 2)}, r"\[B, H, S, D\]"),
    ],
)
def test_a_bad_argument_is_an_error(arguments, message):
    keywords = {"kinds": ["regular"] * 6, "decay": 0.5, "theta": 0.0, "dilation": 1, **arguments}
    value = keywords.pop("value", torch.randn(1, 6, 7, 2))
    with pytest.raises(ValueError, match=message):
        rem_product(value, **keywords)
