"""P V in plain PyTorch and in C++, against dense P, the recurrent network and a double loop."""

import functools

import pytest
import torch

from ops.agreement import DILATION, KINDS, assert_agrees, assert_close, draw, product, values_and_gradients
from references import double_loop, lag_weight, relative_error
from rsa_hf import rem_product
from rsa_hf.ops.reference import dense_rem_product, recurrent_rem_product

pytestmark = pytest.mark.usefixtures("cpu_backend")
DTYPES = (torch.bfloat16, torch.float32, torch.float32)
both_directions = pytest.mark.parametrize("causal", [True, False])


@both_directions
@pytest.mark.parametrize("T", [1, 2, 5, 17, 29])
def test_short_texts_agree_with_all_references(T, causal):
    for reference in (double_loop, dense_rem_product, recurrent_rem_product):
        assert_agrees(draw(T), reference, causal=causal)


@both_directions
@pytest.mark.parametrize("T", [63, 64, 65, 127, 200, 300])
def test_texts_of_some_chunks_agree_with_the_recurrent_network(T, causal):
    assert_agrees(draw(T), recurrent_rem_product, causal=causal)


@pytest.mark.slow  # long texts
def test_texts_of_many_chunks_agree_with_the_recurrent_network():
    # The states of chunks are chunked again, and those of these chunks too.
    assert_agrees(draw(4500, B=1, D=4), recurrent_rem_product)


@pytest.mark.parametrize("window", [None, 30])
def test_half_precision_and_autocast_are_computed_in_float32(window, cpu_backend):
    exact = draw(200)
    tensors = [tensor.detach().to(dtype).requires_grad_() for tensor, dtype in zip(exact, DTYPES, strict=True)]

    windowed = functools.partial(product, sliding_window=window)
    expected = values_and_gradients(windowed, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found = values_and_gradients(windowed, tensors)
    assert found[0].dtype == torch.float32
    assert relative_error(found[0], windowed(*exact)) <= 1e-2
    assert torch.equal(found[0], expected[0])
    if cpu_backend == "cpp":  # plain PyTorch computes a backward pass inside autocast as autocast says
        assert_close(found, expected, 1e-6)


# --- sliding windows ------------------------------------------------------------------------------------------------


@both_directions
@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 70, 101, 149, 150, 151, 200])
def test_windows_agree_with_dense_p(window, causal):
    assert_agrees(draw(150), causal=causal, sliding_window=window)


def test_a_window_loses_no_digits_at_a_slow_decay():
    # Subtracting what has left the window from the full scan in float32 is off by 10 % here.
    value = torch.randn(1, 1, 3000, 2, dtype=torch.float64)
    decay = torch.tensor([1 - 1e-6], dtype=torch.float64)
    expected = rem_product(value, "regular", decay, sliding_window=5)
    found = rem_product(value.float(), "regular", decay.float(), sliding_window=5)
    assert float((found - expected).abs().max()) < 1e-5


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


# --- controls and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("masks", "broken"),
    [
        ({"sliding_window": 7}, {}),
        ({"sliding_window": 7}, {"sliding_window": 8}),
        ({"documents": numbers_of(LENGTHS)}, {}),
        ({"key_mask": torch.arange(80)[None] > 3}, {}),
        ({}, {"causal": False}),
    ],
)
def test_an_ignored_mask_is_caught(masks, broken):
    value, decay, theta = draw(80, B=len(LENGTHS))
    found = rem_product(value, KINDS, decay, theta, **masks)
    assert relative_error(found, dense_rem_product(value, KINDS, decay, theta, (1,) * 6, **broken)) > 1e-2


# Known errors of public re-implementations, as weights of a lag.
WRONG = {
    "cos has no lag": lambda kind, rate, angle, lag: lag_weight(kind, rate, angle / lag ** (kind == "cos"), lag),
    "the lag is the weight": lambda kind, rate, angle, lag: torch.tensor(float(lag), dtype=rate.dtype),
    "long lags are 1": lambda kind, rate, angle, lag: lag_weight(kind, rate, angle, lag if lag < 10 else 0),
}


@pytest.mark.parametrize("broken", WRONG.values(), ids=WRONG)
def test_a_wrong_rem_is_caught(broken):
    value, decay, theta = draw(17)
    found = product(value, decay, theta)
    wrong = double_loop(value, KINDS, decay, theta, DILATION, weight=broken)
    assert relative_error(found, wrong) > 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": "tangent"}, "tangent.*regular, cos, sin"),
        ({"dilation": 0}, "dilation=0"),
        ({"dilation": [1, 2.5, 1, 1, 1, 1]}, r"dilation=2\.5"),
        ({"decay": [0.1, 0.2]}, "one for each of 6 heads"),
        ({"kinds": ["cos"] * 5}, "one for each of 6 heads; got .*5"),
        ({"query_length": 8}, "query_offset from 0 to 7"),
        ({"query_length": 3, "query_offset": 5}, "query_offset from 0 to 7"),
        ({"sliding_window": 0}, "sliding_window=0.*≥ 1"),
        ({"visible": torch.ones(1, 6, 7, 6) > 0}, r"visible .*6\): \[1 or 1, 6 or 1, 7, 7\]"),
        ({"value": torch.randn(6, 7, 2)}, r"\[B, H, S, D\]"),
        ({"free_lags": torch.ones(2, 9)}, r"free_lags has shape \(2, 9\): \[6, K\] with K from 1 to 8 is needed"),
    ],
)
def test_a_bad_argument_is_an_error(arguments, message):
    keywords = {"kinds": ["regular"] * 6, "decay": 0.5, "theta": 0.0, "dilation": 1, **arguments}
    value = keywords.pop("value", torch.randn(1, 6, 7, 2))
    with pytest.raises(ValueError, match=message):
        rem_product(value, **keywords)


def test_one_description_is_for_all_heads():
    value = torch.randn(1, 2, 5, 4)
    found, whole = (rem_product(value, kinds, 0.5, num_key_value_groups=2) for kinds in ("regular", ["regular"] * 4))
    assert found.shape == (1, 4, 5, 4) and torch.equal(found, whole)


def test_no_queries_have_no_output():
    assert rem_product(torch.randn(1, 1, 5, 4), "regular", 0.5, query_length=0, query_offset=0).shape == (1, 1, 0, 4)


def test_numbers_whose_sign_is_a_bit_are_read_with_it():
    # A view of one number is contiguous, so its memory could be read as it is.
    value, rate = torch.randn(1, 1, 7, 4), torch.complex(torch.zeros(1), torch.full((1,), 0.6)).conj().imag
    expected = dense_rem_product(value, ["regular"], torch.tensor([-0.6]), torch.zeros(1), [1])
    torch.testing.assert_close(rem_product(value, "regular", rate).double(), expected.double())
