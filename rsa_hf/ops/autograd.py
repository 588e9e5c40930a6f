"""P V, alone or mixed into attention, as one differentiable operation; and the choice of what computes it.

Eager code goes through an `autograd.Function`; code under `torch.compile` and `torch.export` through the operators
`rsa_hf::recurrence` and `rsa_hf::recurrence_backward`, which a graph holds as one node each: what is done inside
depends on what a mask holds, and a graph cannot ask for that. Both compute the same. Graphs for ONNX, which has no
such operator, hold the plain operators of `traced.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rsa_hf.ops.backend import choose_backend
from rsa_hf.ops.chunked import scan_backward, scan_forward
from rsa_hf.ops.dense import dense_backward, dense_forward
from rsa_hf.ops.export import traced_forward
from rsa_hf.ops.mask import Documents, Geometry, read_mask
from rsa_hf.ops.types import Gradients, Mixing, Recurrence, working_dtype
from rsa_hf.ops.windowed import window_backward, window_forward
from rsa_hf.rem import KINDS

__all__ = ["recur"]

FEW_QUERIES = 16  # with so few queries behind a cache, T·S weights cost less than a scan over all S keys


def recur(value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None = None) -> Tensor:
    """P V in the dtype it is computed in, [B, H, T, D]; or attention + g (P V − attention), [B, T, H', D].

    Args:
        value: V, shape [B, Hv, S, D].
        recurrence: the heads.
        geometry: who sees whom.
        mixing: softmax attention and the gate, or None.
    """
    attention, gate = (None, None) if mixing is None else (mixing.attention, mixing.gate)
    # Decay powers and sums lose too much in half precision, so autocast stays out, also where a backward pass is run
    # inside of it.
    with torch.autocast(value.device.type, enabled=False):
        tensors = (value, recurrence.decay, recurrence.theta, attention, gate)
        if not torch.compiler.is_compiling():
            result: Tensor = _Recurrence.apply(*tensors, recurrence, geometry)  # type: ignore[no-untyped-call]
            return result
        if torch.onnx.is_in_onnx_export():
            return traced_forward(value, recurrence, geometry, mixing)
        documents = None if geometry.documents is None else geometry.documents.numbers
        masks = (geometry.mask, geometry.key_mask, documents, geometry.visible)
        kinds = [KINDS.index(kind) for kind in recurrence.kinds]
        sizes = (geometry.query_length, geometry.query_offset, geometry.causal, geometry.window)
        heads = (kinds, list(recurrence.dilation), recurrence.groups)
        output: Tensor = _operator(*tensors, *masks, *heads, *sizes)
        return output


def _forward(value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None) -> Tensor:
    if value.numel() == 0 or geometry.query_length == 0:
        return _empty_output(value, recurrence, geometry, mixing)
    backend = choose_backend(value, recurrence, mixing)
    if _is_scan(geometry, backend):
        if backend == "triton":
            from rsa_hf.ops.triton.launch import triton_forward

            return triton_forward(value, recurrence, geometry, mixing)
        return scan_forward(value, recurrence, geometry, mixing)
    product = (dense_forward if _is_dense(geometry, backend) else window_forward)(value, recurrence, geometry)
    if mixing is None:
        return product
    H, attention = len(recurrence.kinds), mixing.attention
    # lerp(a, b, g) = a + g (b − a) while g < 1/2, so a shut gate changes no bit.
    gate = mixing.gate[:, None].to(product.dtype)
    mixed = torch.lerp(attention[:, :, :H].to(product.dtype), product.transpose(1, 2), gate)
    return torch.cat([mixed.to(attention.dtype), attention[:, :, H:]], dim=2)


def _backward(
    grad: Tensor, value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None
) -> Gradients:
    if grad.numel() == 0:
        # As zeros of the tensors' own shapes: values may be there that no query asks about.
        tensors = (value, recurrence.decay, recurrence.theta, *((mixing.attention, mixing.gate) if mixing else ()))
        return Gradients(*map(torch.zeros_like, tensors), *(() if mixing else (None, None)))
    with torch.autocast(value.device.type, enabled=False):
        return _backward_of_path(grad, value, recurrence, geometry, mixing)


def _backward_of_path(
    grad: Tensor, value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None
) -> Gradients:
    backend = choose_backend(value, recurrence, mixing)
    if _is_scan(geometry, backend):
        if backend == "triton":
            from rsa_hf.ops.triton.launch import triton_backward

            return triton_backward(grad, value, recurrence, geometry, mixing)
        return scan_backward(grad, value, recurrence, geometry, mixing)
    is_dense = _is_dense(geometry, backend)
    forward, backward = (dense_forward, dense_backward) if is_dense else (window_forward, window_backward)
    if mixing is None:
        return Gradients(*backward(grad, value, recurrence, geometry), None, None)
    H, dtype = len(recurrence.kinds), working_dtype(value)
    product = forward(value, recurrence, geometry).transpose(1, 2)
    dmixed, attention = grad[:, :, :H].to(dtype), mixing.attention[:, :, :H].to(dtype)
    dgate = (dmixed * (product - attention)).sum((0, 1, 3)).to(mixing.gate.dtype)
    gate = mixing.gate[:, None].to(dtype)
    dattention = torch.cat([(dmixed * (1 - gate)).to(grad.dtype), grad[:, :, H:]], dim=2)
    dproduct = (dmixed * gate).transpose(1, 2)
    return Gradients(*backward(dproduct, value, recurrence, geometry), dattention, dgate)


def _empty_output(value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None) -> Tensor:
    """What `_forward` returns, with nothing in it but its shape."""
    if mixing is not None:
        return torch.empty_like(mixing.attention, memory_format=torch.contiguous_format)
    shape = (len(value), len(recurrence.kinds), geometry.query_length, value.shape[3])
    return value.new_empty(shape, dtype=working_dtype(value))


def _is_scan(geometry: Geometry, backend: str) -> bool:
    return geometry.window is None and not _is_dense(geometry, backend)


def _is_dense(geometry: Geometry, backend: str) -> bool:
    few = geometry.query_length <= FEW_QUERIES and geometry.query_length < geometry.key_length
    return backend == "dense" or geometry.visible is not None or few


# --- eager ----------------------------------------------------------------------------------------------------------


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        decay: Tensor,
        theta: Tensor,
        attention: Tensor | None,
        gate: Tensor | None,
        recurrence: Recurrence,
        geometry: Geometry,
    ) -> Tensor:
        ctx.save_for_backward(value, decay, theta, attention, gate)
        ctx.heads, ctx.geometry = (recurrence.kinds, recurrence.dilation, recurrence.groups), geometry
        return _forward(value, recurrence, geometry, _mixing(attention, gate))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, decay, theta, attention, gate = ctx.saved_tensors
        kinds, dilation, groups = ctx.heads
        recurrence = Recurrence(kinds, decay, theta, dilation, groups)
        return (*_backward(grad, value, recurrence, ctx.geometry, _mixing(attention, gate)), None, None)


def _mixing(attention: Tensor | None, gate: Tensor | None) -> Mixing | None:
    return None if attention is None or gate is None else Mixing(attention, gate)


# --- compiled and exported ------------------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor value, Tensor decay, Tensor theta, Tensor? attention, Tensor? gate, Tensor? mask, Tensor? key_mask, "
    "Tensor? documents, Tensor? visible, int[] kinds, int[] dilation, int groups, SymInt query_length, "
    "SymInt query_offset, bool causal, SymInt? window"
)


def _unflatten(*arguments: Any) -> tuple[Tensor, Recurrence, Geometry, Mixing | None]:
    """The arguments of `_forward` from those of the operator."""
    value, decay, theta, attention, gate, mask, key_mask, documents, visible, *others = arguments
    kinds, dilation, groups, query_length, query_offset, causal, window = others
    S = value.shape[2]
    if mask is None:
        packed = None if documents is None else Documents(documents)
        geometry = Geometry(query_length, S, query_offset, causal, key_mask, packed, window, visible)
    else:
        geometry = read_mask(mask, len(value), query_length, S, causal)
    names = tuple(KINDS[kind] for kind in kinds)
    recurrence = Recurrence(names, decay, theta, tuple(dilation), groups)
    return value, recurrence, geometry, _mixing(attention, gate)


@torch.library.custom_op("rsa_hf::recurrence", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _operator(*arguments: Any) -> Tensor:
    return _forward(*_unflatten(*arguments))


@_operator.register_fake
def _(*arguments: Any) -> Tensor:
    # Without the mask, which has no values to read here.
    value, recurrence, geometry, mixing = _unflatten(*arguments[:5], None, *arguments[6:])
    return _empty_output(value, recurrence, geometry, mixing)


@torch.library.custom_op(
    "rsa_hf::recurrence_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_operator(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    gradients = _backward(grad, *_unflatten(*arguments))
    # An operator returns tensors, and no None, with the strides that it promises the compiler.
    return tuple(
        grad.new_empty(0) if gradient is None else _laid_out_like(gradient, tensor)
        for gradient, tensor in zip(gradients, arguments[:5], strict=True)
    )


def _laid_out_like(gradient: Tensor, tensor: Tensor) -> Tensor:
    promised = torch.empty_like(tensor)
    return gradient if gradient.stride() == promised.stride() else promised.copy_(gradient)


@_backward_operator.register_fake
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in arguments[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.others = inputs[9:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    gradients = _backward_operator(grad, *tensors, *ctx.others)
    present = (
        gradient if tensor is not None else None for gradient, tensor in zip(gradients, tensors[:5], strict=True)
    )
    return (*present, *[None] * 11)


_operator.register_autograd(_differentiate, setup_context=_save)
