"""The Triton kernels under torch.compile and torch.export are one graph and give the eager results."""

import pytest
import torch

from ops import kernels_under_test
from ops.agreement import record_calls
from ops.mixed_product import DILATION, KINDS, differentiate, draw
from rsa_hf.ops.autograd import apply_rems
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.triton import launch
from rsa_hf.rem import Rems

small_chunks = kernels_under_test.small_chunks
pytestmark = pytest.mark.usefixtures("small_chunks", "fresh_compiler")
T = 20


def mixed(value, decay, theta, attention, gate):
    rems = Rems(KINDS, decay, theta, DILATION, 1, tuple(range(len(KINDS))))
    return apply_rems(value * 2, rems, AttentionMask(T, T, 0, True), attention, gate) + 1


def test_forward_and_backward_are_one_graph(monkeypatch):
    launches = record_calls(monkeypatch, launch, "triton_forward", "triton_backward")
    tensors = draw(T)
    weights = torch.randn(tensors[3].shape, device=tensors[3].device)
    expected = differentiate(mixed, tensors, weights)
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    found = differentiate(compiled, tensors, weights)
    assert launches == ["triton_forward", "triton_backward"] * 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Mixed(torch.nn.Module):
    def forward(self, *tensors):
        return mixed(*tensors)


def test_an_exported_product_gives_the_eager_result():
    tensors = tuple(tensor.detach() for tensor in draw(T))
    program = torch.export.export(Mixed(), tensors)
    assert torch.equal(program.module()(*tensors), mixed(*tensors))
