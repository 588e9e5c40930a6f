"""P V, alone or mixed into attention (eq. 4), as one differentiable operation; and the choice of the code for it.

Eager code goes through an `autograd.Function`. Code under `torch.compile`, `torch.export` and dispatch modes, such as
FakeTensorMode, goes through the operators `rsa_hf::recurrence` and `rsa_hf::recurrence_backward`, one node each in a
graph: the path taken inside depends on the values of a mask, which a graph does not know. Both compute the same. ONNX
has no such operator, and its lengths are symbols; there P is built from plain operators.

The first derivatives in backward mode are written by hand. All others go through `differentiable_product`, which
PyTorch differentiates itself, at quadratic cost: a backward pass with `create_graph=True`, forward mode, and the
transforms of `torch.func`, which see through PyTorch's own operations only.

`RSA_HF_BACKEND=dense|chunked|cpp|triton` chooses the code. By default it is Triton on a GPU that can run it, C++ on a
CPU if there is a compiler, else plain PyTorch, in chunks. Triton does not support sliding windows, and neither it nor
C++ arbitrary masks; plain PyTorch computes those under every setting.
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rsa_hf.ops import cpp
from rsa_hf.ops.chunked import empty_output, scan_backward, scan_forward
from rsa_hf.ops.cpp.launch import cpp_backward, cpp_forward
from rsa_hf.ops.dense import dense_backward, dense_forward, differentiable_product
from rsa_hf.ops.mask import AttentionMask, PackedSegments, read_mask, read_traced
from rsa_hf.ops.types import Gradients, SoftmaxBranch
from rsa_hf.ops.windowed import window_backward, window_forward
from rsa_hf.rem import KINDS, Rems, is_recorded, mix, put_heads, take_heads, working_dtype

__all__ = ["BACKENDS", "apply_rems", "choose_backend", "is_transformed", "traced_forward"]

BACKENDS = ("dense", "chunked", "cpp", "triton")
VARIABLE = "RSA_HF_BACKEND"
FEW_QUERIES = 16  # with so few queries after cached keys, T·S weights cost less than a scan over all S keys


def apply_rems(value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None = None) -> Tensor:
    """P V in the dtype it is computed in, [B, H, T, D]; or (1 − g) · attention + g · P V, [B, T, H', D].

    Args:
        value: V, [B, Hv, S, D].
        rems: the H heads.
        mask: which keys each query sees.
        softmax: attention's output and the gate, to mix P V into; or None.
    """
    attention, gate = (None, None) if softmax is None else (softmax.attention, softmax.gate)
    # Without autocast: decay powers and sums lose too much in half precision.
    with torch.autocast(value.device.type, enabled=False):
        if is_transformed():
            return differentiable_product(value, rems, mask, softmax)
        tensors = (value, rems.decay, rems.theta, attention, gate)
        if not is_recorded():
            result: Tensor = _ApplyRems.apply(*tensors, rems, mask)  # type: ignore[no-untyped-call]
            return result
        if torch.onnx.is_in_onnx_export():
            return traced_forward(value, rems, mask, softmax)
        segment_ids = None if mask.segments is None else mask.segments.ids
        masks = (mask.unread_mask, mask.key_mask, segment_ids, mask.visible)
        kinds = [KINDS.index(kind) for kind in rems.kinds]
        heads = (kinds, list(rems.dilation), list(rems.heads), rems.heads_per_value)
        sizes = (mask.query_length, mask.query_offset, mask.causal, mask.sliding_window)
        output: Tensor = torch.ops.rsa_hf.recurrence(*tensors, *masks, *heads, *sizes)
        return output


def is_transformed() -> bool:
    """Whether a transform of `torch.func`, a batched backward pass or forward-mode differentiation is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def traced_forward(value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None) -> Tensor:
    """`apply_rems` in plain operators that do not depend on values, for graphs that leave PyTorch."""
    return _mixed(dense_forward(value, rems, read_traced(mask)), rems, softmax)


def _mixed(product: Tensor, rems: Rems, softmax: SoftmaxBranch | None) -> Tensor:
    return product if softmax is None else mix(softmax.attention, product, softmax.gate, rems.heads)


# --- which code -----------------------------------------------------------------------------------------------------


def _path(value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None) -> str:
    """`"dense"`, `"windowed"`, or a backend that takes the mask."""
    backend = choose_backend(value, rems, softmax)
    few = mask.query_length <= FEW_QUERIES and mask.query_length < mask.key_length
    if backend == "dense" or mask.visible is not None or few:
        return "dense"
    return backend if mask.sliding_window is None or backend == "cpp" else "windowed"


def choose_backend(value: Tensor, rems: Rems, softmax: SoftmaxBranch | None) -> str:
    """One of BACKENDS: what RSA_HF_BACKEND says, else by device as above.

    Raises:
        ValueError: RSA_HF_BACKEND is none of BACKENDS.
        RuntimeError: RSA_HF_BACKEND is cpp or triton, which cannot run here.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", *BACKENDS):
        raise ValueError(f"{VARIABLE}={chosen!r}: choose from {', '.join(BACKENDS)}, or unset it for the default.")
    if chosen in ("dense", "chunked"):
        return chosen
    if chosen == "cpp" or (not chosen and value.device.type == "cpu"):
        return _unless("cpp", cpp.obstacle(value, softmax), chosen)
    if chosen == "triton" or value.device.type == "cuda":
        from rsa_hf.ops.triton import obstacle

        reason = obstacle(value, rems, softmax)
        if reason is not None and not chosen:
            _warn_once(f"RSA computes P V in plain PyTorch, not in Triton: {reason}.")
        return _unless("triton", reason, chosen)
    return "chunked"


def _unless(backend: str, reason: str | None, chosen: str) -> str:
    """The backend if there is no reason against it, else plain PyTorch; an error if it was chosen."""
    if reason is None:
        return backend
    if chosen:
        raise RuntimeError(
            f"{VARIABLE}={backend} cannot run: {reason}. Unset it, or choose one of {', '.join(BACKENDS[:2])}."
        )
    return "chunked"


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _forward(value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None) -> Tensor:
    if value.numel() == 0 or mask.query_length == 0:
        return empty_output(value, rems, mask, softmax)
    path = _path(value, rems, mask, softmax)
    if path == "chunked":
        return scan_forward(value, rems, mask, softmax)
    if path == "cpp":
        return cpp_forward(value, rems, mask, softmax)
    if path == "triton":
        from rsa_hf.ops.triton.launch import triton_forward

        return triton_forward(value, rems, mask, softmax)
    forward = dense_forward if path == "dense" else window_forward
    return _mixed(forward(value, rems, mask), rems, softmax)


def _backward(
    grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None
) -> Gradients:
    if grad.numel() == 0:
        # There may be values without queries.
        tensors = (value, rems.decay, rems.theta, *((softmax.attention, softmax.gate) if softmax else ()))
        return Gradients(*map(torch.zeros_like, tensors))
    path = _path(value, rems, mask, softmax)
    with torch.autocast(value.device.type, enabled=False):
        if path == "chunked":
            return scan_backward(grad, value, rems, mask, softmax)
        if path == "cpp":
            return cpp_backward(grad, value, rems, mask, softmax)
        if path == "triton":
            from rsa_hf.ops.triton.launch import triton_backward

            return triton_backward(grad, value, rems, mask, softmax)
        is_dense = path == "dense"
        forward, backward = (dense_forward, dense_backward) if is_dense else (window_forward, window_backward)
        if softmax is None:
            return backward(grad, value, rems, mask)
        dtype = working_dtype(value)
        product = forward(value, rems, mask).transpose(1, 2)
        dmixed, attention = (take_heads(x, rems.heads, dim=2).to(dtype) for x in (grad, softmax.attention))
        gate = softmax.gate[:, None].to(dtype)
        dgate = (dmixed * (product - attention)).sum((0, 1, 3)).to(softmax.gate.dtype)
        dattention = put_heads(grad, (dmixed * (1 - gate)).to(grad.dtype), rems.heads)
        gradients = backward((dmixed * gate).transpose(1, 2), value, rems, mask)
        return gradients._replace(attention=dattention, gate=dgate)


# --- eager ----------------------------------------------------------------------------------------------------------


class _ApplyRems(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        decay: Tensor,
        theta: Tensor,
        attention: Tensor | None,
        gate: Tensor | None,
        rems: Rems,
        mask: AttentionMask,
    ) -> Tensor:
        ctx.save_for_backward(value, decay, theta, attention, gate)
        ctx.heads, ctx.mask = (rems.kinds, rems.dilation, rems.heads_per_value, rems.heads), mask
        return _forward(value, rems, mask, _softmax_branch(attention, gate))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, decay, theta, attention, gate = ctx.saved_tensors
        kinds, dilation, heads_per_value, heads = ctx.heads
        rems = Rems(kinds, decay, theta, dilation, heads_per_value, heads)
        backward = _differentiable_backward if _is_differentiated_again(grad) else _backward
        return (*backward(grad, value, rems, ctx.mask, _softmax_branch(attention, gate)), None, None)


def _is_differentiated_again(grad: Tensor) -> bool:
    """Whether the result of this backward pass is part of a graph, or of a transform."""
    # `is_grads_batched=True` has a batch of its own kind.
    return torch.is_grad_enabled() or is_transformed() or torch._C._functorch.is_legacy_batchedtensor(grad)


def _differentiable_backward(
    grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None
) -> list[Tensor | None]:
    """`_backward` in ordinary PyTorch operations; None where no gradient is required."""
    inputs = (value, rems.decay, rems.theta, *((softmax.attention, softmax.gate) if softmax else ()))
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(value.device.type, enabled=False):
        # Views, because attention's output is computed from V: the gradient of V itself would contain that path too.
        views = [tensor.view_as(tensor) for tensor in inputs]
        rems = replace(rems, decay=views[1], theta=views[2])
        output = differentiable_product(views[0], rems, mask, SoftmaxBranch(*views[3:]) if softmax else None)
        required = [view for view in views if view.requires_grad]
        found = torch.autograd.grad(output, required, grad, create_graph=create_graph, materialize_grads=True)
    gradients = iter(found)
    return [next(gradients) if tensor.requires_grad else None for tensor in views] + [None] * (5 - len(views))


def _softmax_branch(attention: Tensor | None, gate: Tensor | None) -> SoftmaxBranch | None:
    return None if attention is None or gate is None else SoftmaxBranch(attention, gate)


# --- compiled and exported ------------------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor value, Tensor decay, Tensor theta, Tensor? attention, Tensor? gate, Tensor? mask, Tensor? key_mask, "
    "Tensor? documents, Tensor? visible, int[] kinds, int[] dilation, int[] heads, int groups, SymInt query_length, "
    "SymInt query_offset, bool causal, SymInt? window"
)


def _unflatten(*arguments: Any) -> tuple[Tensor, Rems, AttentionMask, SoftmaxBranch | None]:
    """The arguments of `_forward` from those of the operator."""
    value, decay, theta, attention, gate, mask, key_mask, segment_ids, visible, *others = arguments
    kinds, dilation, heads, heads_per_value, query_length, query_offset, causal, window = others
    S = value.shape[2]
    if mask is None:
        packed = None if segment_ids is None else PackedSegments(segment_ids)
        mask = AttentionMask(query_length, S, query_offset, causal, key_mask, packed, window, visible)
    else:
        mask = read_mask(mask, len(value), query_length, S, causal)
    names = tuple(KINDS[kind] for kind in kinds)
    rems = Rems(names, decay, theta, tuple(dilation), heads_per_value, tuple(heads))
    return value, rems, mask, _softmax_branch(attention, gate)


# Not `torch.library.custom_op`, which looks for the source lines of what it registers among all modules: 40 ms.
_LIBRARY = torch.library.Library("rsa_hf", "DEF")
_LIBRARY.define(f"recurrence({_ARGUMENTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(
    f"recurrence_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(_LIBRARY, "recurrence", "CompositeExplicitAutograd")
def _operator(*arguments: Any) -> Tensor:
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "rsa_hf::recurrence, P V in an exported program, has no forward-mode derivative. Differentiate the model "
            "that was exported, or use backward mode."
        )
    return _forward(*_unflatten(*arguments))


@torch.library.impl(_LIBRARY, "recurrence", "Meta")
def _(*arguments: Any) -> Tensor:
    # Without the mask, which has no values to read here.
    value, rems, mask, softmax = _unflatten(*arguments[:5], None, *arguments[6:])
    return empty_output(value, rems, mask, softmax)


@torch.library.impl(_LIBRARY, "recurrence_backward", "CompositeExplicitAutograd")
def _backward_operator(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    gradients = _backward(grad, *_unflatten(*arguments))
    # An operator returns tensors (never None), with the strides that its fake implementation promises.
    return tuple(
        grad.new_empty(0) if gradient is None else _laid_out_like(gradient, tensor)
        for gradient, tensor in zip(gradients, arguments[:5], strict=True)
    )


def _laid_out_like(gradient: Tensor, tensor: Tensor) -> Tensor:
    promised = torch.empty_like(tensor)
    return gradient if gradient.stride() == promised.stride() else promised.copy_(gradient)


@torch.library.impl(_LIBRARY, "recurrence_backward", "Meta")
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in arguments[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.others = inputs[9:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    if _is_differentiated_again(grad):
        return (*_differentiable_backward(grad, *_unflatten(*tensors, *ctx.others)), *[None] * 12)
    gradients = torch.ops.rsa_hf.recurrence_backward(grad, *tensors, *ctx.others)
    present = (
        gradient if tensor is not None else None for gradient, tensor in zip(gradients, tensors[:5], strict=True)
    )
    return (*present, *[None] * 12)


torch.library.register_autograd("rsa_hf::recurrence", _differentiate, setup_context=_save, lib=_LIBRARY)
