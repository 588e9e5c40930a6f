"""P V with extreme numbers, by every path: finite, and equal to a double loop in float64."""

import contextlib
from collections import Counter

import pytest
import torch
from hypothesis import Phase, given, settings

from references import double_loop
from reliability.extremes import assert_right, differentiated, problems
from reliability.record import Part, is_full, note
from rsa_hf import rem_product
from rsa_hf.ops import autograd
from rsa_hf.ops.decode import LagTable, decode
from rsa_hf.ops.mask import AttentionMask, segment_index
from rsa_hf.ops.pytorch import product_in_pytorch
from rsa_hf.rem import Rems

EXAMPLES = 80 if is_full() else 12
some = settings(max_examples=EXAMPLES, phases=(Phase.explicit, Phase.generate))
tried: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _recorded():
    yield
    note(Part.NUMBERS, "P V of extreme values, rates, angles, dilations and masks, by path", tried)


@contextlib.contextmanager
def backend(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RSA_HF_BACKEND", name)
        yield patch


@pytest.mark.parametrize("name", ["pytorch", "cpp"])
@some
@given(problem=problems())
def test_the_backends_are_right(name, problem):
    with backend(name):
        assert_right(problem, differentiated(problem))
    tried[name] += 1


@some
@given(problem=problems())
def test_the_operator_of_compiled_graphs_is_right(problem):
    with backend("pytorch") as patch:
        patch.setattr(autograd.torch.compiler, "is_compiling", lambda: True)
        found = differentiated(problem)
    assert_right(problem, found)
    tried["operator"] += 1


def rems_and_mask(problem):
    S, masks = problem.value.shape[2], problem.masks
    segments = segment_index(masks["documents"]) if "documents" in masks else None
    others = masks.get("key_mask"), segments, masks.get("window"), masks.get("visible")
    rems = Rems(
        problem.kinds, problem.decay, problem.theta, problem.dilation, problem.groups, tuple(range(len(problem.kinds)))
    )
    return rems, AttentionMask(problem.T, S, S - problem.T, problem.causal, *others)


@some
@given(problem=problems())
def test_the_operators_of_exported_graphs_are_right(problem):
    assert_right(problem, [product_in_pytorch(problem.value, *rems_and_mask(problem))])
    tried["traced"] += 1


@some
@given(
    problem=problems(queries=1, causal=True, batches=(1, 2), masks=("none", "padding", "window 1", "window", "any"))
)
def test_a_step_of_decoding_is_right(problem):
    rems, mask = rems_and_mask(problem)
    S = problem.value.shape[2]
    for table in (None, LagTable(rems, problem.working, S), LagTable(rems, problem.working, 10 * S)):
        found = decode(problem.value, rems, mask, table)
        assert_right(problem, [found], floor=0 if table is None else 2.0**-30)
    tried["decode"] += 1


MASKS = {
    "none": lambda B, S: {},
    "padding": lambda B, S: {"key_mask": torch.ones(B, S, dtype=torch.bool)},
    "documents": lambda B, S: {"documents": torch.arange(S).expand(B, -1)},
    "window": lambda B, S: {"window": 2},
    "documents in a window": lambda B, S: {"window": 2, "documents": torch.arange(S).expand(B, -1)},
    "any": lambda B, S: {"visible": torch.ones(B, 1, S, S, dtype=torch.bool)},
}


@pytest.mark.parametrize("name", ["pytorch", "cpp"])
@pytest.mark.parametrize(("B", "S"), [(0, 5), (0, 40), (2, 0), (0, 0)])
@pytest.mark.parametrize("mask", MASKS)
def test_empty_values_give_empty_outputs_and_zero_gradients(name, B, S, mask):
    value = torch.ones(B, 2, S, 3, requires_grad=True)
    decay = torch.tensor([0.9, 0.8], requires_grad=True)
    with backend(name):
        output = rem_product(value, ("regular", "cos"), decay, 1.0, (1, 3), **MASKS[mask](B, S))
        assert output.shape == (B, 2, S, 3)
        output.sum().backward()
    assert value.grad.shape == value.shape
    assert torch.equal(decay.grad, torch.zeros(2))


@pytest.mark.parametrize("name", ["pytorch", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_shared_values_are_rounded_once(name, dtype):
    # The gradient from each head is out of the range of float16. Their sum is not.
    T, large = 40, 60_000.0
    value = torch.zeros(1, 1, T, 2, dtype=dtype, requires_grad=True)
    weights = torch.tensor([large, -large])[None, :, None, None].expand(1, 2, T, 2)
    decay, dilation = torch.tensor([0.9, 0.9]), (1, 2)
    with backend(name):
        output = rem_product(value, "regular", decay, dilation=dilation, groups=2)
        (found,) = torch.autograd.grad(output, value, weights)
    exact = value.detach().double().requires_grad_()
    keys = exact.repeat_interleave(2, 1)
    right = double_loop(keys, ("regular",) * 2, decay.double(), torch.zeros(2).double(), dilation, T, 0, True)
    (expected,) = torch.autograd.grad(right, exact, weights.double())
    fits = expected.abs() < torch.finfo(dtype).max
    assert bool(fits.any())
    assert bool(found.isfinite()[fits].all())
    off = (found.double() - expected).abs()[fits]
    assert float((off - torch.finfo(dtype).eps * expected.abs()[fits]).max()) <= 1e-5 * large * T
