"""The Triton kernels against dense P in float64, values and gradients: interpreted, or on a GPU if there is one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops import kernels_under_test
from ops.kernels_under_test import DEVICE, KINDS, agreement, assert_agrees, differentiate, draw
from references import relative_error
from rsa_hf import rem_product
from rsa_hf.ops.reference import dense_rem_product
from rsa_hf.ops.triton import launch
from rsa_hf.ops.triton.tuning import Tuning, block_of

small_chunks = kernels_under_test.small_chunks
pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("causal", [True, False])
def test_an_odd_length_agrees_with_dense_p(causal):
    assert_agrees(agreement(draw(37, B=2), causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 2, 16, 33])
@pytest.mark.slow
def test_lengths_around_a_chunk_agree_with_dense_p(T, causal):
    assert_agrees(agreement(draw(T), causal=causal))


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
    tensors[0].data[~key_mask[:, None].expand(-1, 3, -1).to(DEVICE)] = math.nan
    assert_agrees(agreement(tensors, causal=causal, key_mask=key_mask))


def packed_rows(S):
    # Numbers of neighbours differ. Documents end inside chunks and at their borders.
    ends = torch.zeros(2, S, dtype=torch.long)
    for row, cuts in enumerate(((3, 4, 16, 20), (18,))):
        ends[row, list(cuts)] = 1
    return ends.cumsum(1) * 7 % 5


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_agree_with_dense_p(causal):
    key_mask = torch.ones(2, 35, dtype=torch.bool)
    key_mask[0, 5:8] = False
    assert_agrees(agreement(draw(35, B=2), causal=causal, documents=packed_rows(35), key_mask=key_mask))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_segments_agree_with_dense_p(monkeypatch, causal, packed):
    S, T = 60, 50
    monkeypatch.setattr(launch, "_splits", lambda *sizes: 4)
    documents = None
    if packed:
        documents = torch.zeros(1, S, dtype=torch.long)
        documents[:, 40:] = 1
    assert_agrees(agreement(draw(T, S, heads=2, plain=0), KINDS[1:], (1, 2), causal=causal, documents=documents))
    if packed:
        return
    # The control: without the states passed between segments, values and gradients are wrong.
    monkeypatch.setattr(
        launch._Launch, "_written", lambda self, *x, **y: torch.zeros(self.programs, 2, 4, 32, device=DEVICE)
    )
    broken = agreement(draw(T, S, heads=1, plain=0), KINDS[1:2], (1,), causal=causal)
    assert min(broken[name] for name in ("output", "dvalue", "ddecay", "dgate")) > 1e-4, broken


@pytest.mark.parametrize("heads", [4, 3])
def test_grouped_values_agree_with_dense_p(heads):
    # With three heads, the second value head serves one of them.
    assert_agrees(agreement(draw(20, heads=heads, groups=2), (*KINDS, "cos")[:heads], (1, 2, 1, 3)[:heads], groups=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_dense_p(dtype):
    assert_agrees(agreement(draw(33, dtype=dtype), causal=False), dtype)


def test_half_precision_loses_no_digits_of_the_weights():
    # The kernels keep a weight as the sum of two 16-bit numbers.
    value, decay, theta, *_ = draw(33, dtype=torch.bfloat16)
    found = rem_product(value, KINDS, decay, theta)
    exact_value, exact_decay, exact_theta = (tensor.double().cpu() for tensor in (value, decay, theta))
    exact = dense_rem_product(exact_value, KINDS, exact_decay, exact_theta, (1, 1, 1))
    assert found.dtype == torch.float32
    assert relative_error(found.cpu(), exact) < 2e-5


@pytest.mark.parametrize("D", [5, 80])
def test_odd_head_sizes_agree_with_dense_p(D):
    assert_agrees(agreement(draw(18, D=D, heads=1), KINDS[1:2], (1,)))


@pytest.mark.slow
@pytest.mark.parametrize("D", [1, 16, 24, 32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_all_head_sizes_agree_with_dense_p(D, causal):
    assert_agrees(agreement(draw(18, D=D, heads=2), KINDS[:2], (1, 2), causal=causal))


@pytest.mark.parametrize("rate", [0.0, 1e-3, 1 - 1e-6, -(1 - 1e-6)])
def test_extreme_rates_agree_with_dense_p(rate):
    tensors = draw(35, heads=2, plain=0)
    tensors[1].data[:] = rate
    assert_agrees(agreement(tensors, KINDS[:2], (1, 1)))


def test_a_dilation_longer_than_the_text_agrees_with_dense_p():
    assert_agrees(agreement(draw(9, heads=2), KINDS[:2], (8, 90)))


def test_strided_and_expanded_tensors_agree_with_dense_p():
    value, _, theta, attention, _ = draw(20)
    # The channels are apart in memory, and all heads share one gate and one rate.
    apart = value.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    attention_apart = attention.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    one, shared_gate = (torch.tensor([x], device=DEVICE).expand(3).detach().requires_grad_() for x in (0.9, 0.3))
    assert one.stride() == (0,)
    assert_agrees(agreement([apart, one, theta, attention_apart, shared_gate]))


def test_a_shut_gate_and_plain_heads_change_no_bit():
    tensors = draw(20, dtype=torch.bfloat16, plain=2)
    tensors[4].data.zero_()
    errors = agreement(tensors)
    assert errors["output"] == 0
    assert errors["dattention"] == 0


def test_the_product_alone_agrees_with_dense_p():
    tensors = draw(20)[:3]
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    weights = torch.randn(1, 3, 20, 16, device=DEVICE)
    found = differentiate(lambda v, r, a: rem_product(v, KINDS, r, a), tensors, weights)
    expected = differentiate(
        lambda v, r, a: dense_rem_product(v, KINDS, r, a, (1, 1, 1)), exact, weights.double().cpu()
    )
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.cpu(), b) < 1e-5


def test_results_are_deterministic():
    tensors = draw(35)
    runs = []
    for _ in range(2):
        output = rem_product(*tensors[:1], KINDS, *tensors[1:3], (1, 2, 1))
        runs.append([output, *torch.autograd.grad(output.square().sum(), tensors[:3])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def cosines_for_sines(kinds, dilation, residues, device):
    return plan(tuple("cos" if kind == "sin" else kind for kind in kinds), dilation, residues, device)


def no_angles(kinds, dilation, residues, device):
    return plan(("regular",) * len(kinds), dilation, residues, device)


plan = launch._plan


@pytest.mark.parametrize("broken", [cosines_for_sines, no_angles])
def test_a_wrong_rem_is_caught(monkeypatch, broken):
    monkeypatch.setattr(launch, "_plan", broken)
    errors = agreement(draw(20))
    assert min(errors[name] for name in ("output", "dvalue", "ddecay")) > 1e-2, errors


def test_windows_and_visible_masks_use_plain_pytorch(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("the kernels were called")

    monkeypatch.setattr(launch, "triton_forward", refuse)
    value, decay, theta, *_ = (tensor.detach() for tensor in draw(20))
    expected = rem_product(
        value, KINDS, decay, theta, window=20, visible=torch.ones(1, 1, 20, 20).bool().tril().to(DEVICE)
    )
    assert torch.allclose(rem_product(value, KINDS, decay, theta, window=20), expected, atol=1e-5)
    with pytest.raises(AssertionError, match="called"):
        rem_product(value, KINDS, decay, theta)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    T=st.integers(1, 40),
    before=st.integers(0, 40),
    behind=st.integers(0, 5),
    causal=st.booleans(),
    heads=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 4)), min_size=1, max_size=2),
    groups=st.integers(1, 2),
    cuts=st.sets(st.integers(1, 80), max_size=4),
    hidden=st.sets(st.integers(0, 80), max_size=4),
    segments=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from([16, 32]),
    D=st.integers(1, 40),
    seed=st.integers(0, 10_000),
)
def test_random_shapes_and_masks_agree_with_dense_p(
    T, before, behind, causal, heads, groups, cuts, hidden, segments, chunk, D, seed
):
    torch.manual_seed(seed)
    S = T + before + behind
    if T <= 16 < S or T == S == 0:
        T, before = S - behind, 0  # few queries take another path
    kinds, dilation = zip(*heads, strict=True)
    tensors = draw(T, S, D=D, heads=len(kinds), groups=groups)
    tensors[1].data.uniform_(-1, 1)
    tensors[2].data.uniform_(-3, 3)
    documents = torch.zeros(1, S, dtype=torch.long)
    for cut in cuts:
        documents[:, cut:] += 1
    key_mask = torch.ones(1, S, dtype=torch.bool)
    key_mask[0, [place for place in hidden if place < S]] = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_splits", lambda *sizes: segments)
        patch.setattr(launch, "candidates", lambda kernel, D, bits: [Tuning(chunk, block_of(D, 32), 4, 2)])
        errors = agreement(
            tensors, kinds, dilation, groups, before, causal, key_mask if hidden else None, documents if cuts else None
        )
    # The relative error of a sum that is nearly zero is large.
    assert_agrees({name: error for name, error in errors.items() if name not in kernels_under_test.SUMS})
    assert all(error < 1e-3 for error in errors.values()), errors
