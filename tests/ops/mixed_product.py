"""P V mixed into attention: inputs, and their values and gradients against dense P in float64, for each backend."""

import functools
import math

import torch

from references import relative_error
from rsa_hf.ops import autograd
from rsa_hf.ops.autograd import solve
from rsa_hf.ops.mask import AttentionMask, document_index
from rsa_hf.ops.problem import from_rems
from rsa_hf.ops.reference import dense_rem_product
from rsa_hf.rem import Rems

KINDS = ("regular", "cos", "sin")
DILATION = (1, 2, 1)
RATES = (-0.9, 0.97, 0.8)
ANGLES = (0.0, math.pi / 4, 2.0)
NAMES = ("output", "dvalue", "ddecay", "dtheta", "dattention", "dgate")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Gradients that are summed in float32, whatever the dtype of the values.
SUMS = ("ddecay", "dtheta", "dgate")


def device():
    """Where the backend that the test has chosen is tried."""
    on_gpu = torch.cuda.is_available() and autograd.REQUESTED == "triton"
    return torch.device("cuda" if on_gpu else "cpu")


def draw(T, S=None, B=1, D=16, heads=3, plain=1, groups=1, value_heads=None, dtype=torch.float32):
    """V, decay, θ, attention and gate in the layout of models: views of one projection, [B, S, heads, D] in memory."""
    S = T if S is None else S
    repeat = -(-heads // 3)
    shared = value_heads or -(-heads // groups)
    value = torch.randn(B, S, 3 * shared, D)[:, :, shared : 2 * shared].transpose(1, 2)
    attention = torch.randn(B, heads + plain, T, D).transpose(1, 2)
    rates = [torch.tensor((numbers * repeat)[:heads]) for numbers in (RATES, ANGLES)]
    gate = torch.linspace(0.2, 0.9, heads)
    tensors = (value.to(dtype), *rates, attention.to(dtype), gate)
    return [tensor.to(device()).detach().requires_grad_() for tensor in tensors]


def agreement(
    tensors,
    kinds=KINDS,
    dilation=DILATION,
    groups=1,
    offset=None,
    causal=True,
    key_mask=None,
    documents=None,
    window=None,
    visible=None,
    heads=None,
    expected_heads=None,
    derivatives=None,
):
    """Relative errors against dense P in float64 with autograd, by name.

    `derivatives(function, tensors)` gives what is compared; by default the output and all gradients. `heads` are the
    indices of the RSA heads in the layer; by default they are its first ones. Dense P has them at `expected_heads`, by
    default the same.
    """
    heads = tuple(range(len(kinds))) if heads is None else heads
    value, attention = tensors[0], tensors[3]
    T, S = attention.shape[1], value.shape[2]
    offset = S - T if offset is None else offset
    masks = {"key_mask": key_mask, "documents": documents, "visible": visible}
    on_device = {name: None if mask is None else mask.to(device()) for name, mask in masks.items()}
    packed = None if documents is None else document_index(on_device["documents"])
    where = (T, S, offset, causal, on_device["key_mask"], packed, window, on_device["visible"])
    weights = torch.randn(attention.shape).to(attention.dtype).to(device())

    def first(function, tensors):
        return differentiate(lambda *t: function(t), tensors, weights.to(tensors[0]))

    def exactly(tensors):
        where = {"query_length": T, "query_offset": offset, "causal": causal, "sliding_window": window, **masks}
        return equation_4(tensors, kinds, dilation, groups, expected_heads or heads, **where)

    derivatives = derivatives or first
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    mixed = functools.partial(mixed_product, attention_mask=AttentionMask(*where), heads=heads)
    found = derivatives(lambda t: mixed(t, kinds, dilation, groups), tensors)
    expected = derivatives(exactly, exact)
    assert all(a.dtype == b.dtype for a, b in zip(found[-5:], tensors, strict=True))
    names = NAMES[-len(found) :]
    return {name: relative_error(a.cpu(), b) for name, a, b in zip(names, found, expected, strict=True)}


def equation_4(tensors, kinds, dilation, groups, heads, **masks):
    """Eq. 4 with dense P, in ordinary operations; `heads` are the places of the RSA heads in the layer."""
    value, decay, theta, attention, gate = tensors
    read = value[:, [head // groups for head in heads]]
    product = dense_rem_product(read, kinds, decay, theta, dilation, **masks)
    layer = list(attention.unbind(2))
    for i, head in enumerate(heads):
        layer[head] = (1 - gate[i]) * layer[head] + gate[i] * product[:, i]
    return torch.stack(layer, 2)


def mixed_product(tensors, kinds, dilation, groups, attention_mask, heads):
    value, decay, theta, attention, gate = tensors
    turns = torch.tensor([kind != "regular" for kind in kinds], device=theta.device)
    rems = Rems(kinds, decay, torch.where(turns, theta, 0), dilation, groups, heads)
    return solve(from_rems(value, rems, attention_mask, attention, gate))


def differentiate(function, tensors, weights):
    output = function(*tensors)
    return [output, *torch.autograd.grad(output, tensors, weights, allow_unused=True, materialize_grads=True)]


def assert_agrees(errors, dtype=torch.float32):
    for name, error in errors.items():
        assert error <= (1e-5 if name in SUMS else TOLERANCE[dtype]), errors
