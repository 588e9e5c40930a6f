"""P V under torch.compile and torch.export is one graph, forward and backward, and gives the eager results."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

from ops.agreement import DILATION, KINDS, Product, assert_close, draw, product, values_and_gradients
from ops.mixed_product import DILATION as MIXED_DILATION
from ops.mixed_product import KINDS as MIXED_KINDS
from ops.mixed_product import differentiate, mixed_product
from ops.mixed_product import draw as mixed_tensors
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.rem import KINDS as ALL_KINDS

# Traces forward and backward through AOT autograd as the default backend does, without compiling machine code.
compiled = torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)

pytestmark = pytest.mark.usefixtures("fresh_compiler")
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "cache": {"query_length": 19},
    "padding": {"key_mask": torch.arange(70)[None] >= torch.tensor([[5], [0]])},
    "documents": {"documents": torch.arange(70)[None] // torch.tensor([[9], [40]])},
    "window": {"sliding_window": 9, "causal": False},
    "visible": {"visible": torch.rand(2, 1, 70, 70, generator=torch.Generator().manual_seed(0)) < 0.7},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_forward_and_backward_are_one_graph(mask):
    masked, tensors = functools.partial(product, **mask), draw(70)
    expected = values_and_gradients(masked, tensors)
    assert_close(values_and_gradients(compiled(masked), tensors), expected, 1e-14)


@pytest.mark.usefixtures("backend")
def test_a_product_that_is_mixed_in_is_one_graph():
    def mixed(value, *others):
        tensors, mask = (value * 2, *others), AttentionMask(20, 20, 0, True)
        return mixed_product(tensors, MIXED_KINDS, MIXED_DILATION, 1, mask, (0, 1, 2))

    tensors = mixed_tensors(20)
    weights = torch.randn(tensors[3].shape, device=tensors[3].device)
    expected = differentiate(mixed, tensors, weights)
    for a, b in zip(differentiate(compiled(mixed), tensors, weights), expected, strict=True):
        assert torch.equal(a, b)


def test_a_new_length_does_not_recompile():
    graphs = CompileCounter()
    dynamic = torch.compile(Product(), fullgraph=True, backend=graphs)
    for T in (40, 47, 90, 300):
        tensors = [tensor.detach() for tensor in draw(T)]
        torch._dynamo.mark_dynamic(tensors[0], 2)
        assert torch.equal(dynamic(*tensors), Product()(*tensors))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("mixed", [True, False])
def test_the_operator_passes_the_checks_of_torch_library(mixed):
    # They cover the schema, fake tensors, the autograd registration and AOT dispatch.
    value, decay, theta = draw(40, dtype=torch.float32)
    decay, theta = (tensor.detach().float().requires_grad_() for tensor in (decay, theta))
    free_lags = torch.randn(12, requires_grad=True)
    attention = torch.randn(2, 40, 8, 3, requires_grad=True) if mixed else None
    gate = torch.rand(6).requires_grad_() if mixed else None
    masks = (None, torch.arange(40)[None] >= torch.tensor([[5], [0]]), None, None)
    rows = [(i, ALL_KINDS.index(KINDS[i]), DILATION[i], i, i, i) for i in range(6)]
    others = (sum(rows, ()), 2.0, 2, 1, 40, 0, True, None)
    arguments = (value, attention, gate, decay, decay, theta, free_lags, *masks, *others)
    opcheck(torch.ops.rsa_hf.recurrence.default, arguments)
