"""P V, alone or mixed into attention (eq. 4), as one differentiable operation; and the choice of the code for it.

`RSA_HF_BACKEND=pytorch|cpp|triton` chooses the code. By default it is Triton on a GPU that can run it, C++ on a CPU if
there is a compiler, else plain PyTorch. Neither Triton nor C++ supports arbitrary masks, and Triton does not support
sliding windows; PyTorch computes those under every setting.

`product_in_pytorch` is differentiated by PyTorch itself, any number of times and in every mode. C++ and Triton have
their first derivatives in an `autograd.Function`; for all others (a backward pass with `create_graph=True`, forward
mode, the transforms of `torch.func`) `product_in_pytorch` takes their place.

Code under `torch.compile`, `torch.export` and dispatch modes, such as FakeTensorMode, goes through the operators
`rsa_hf::recurrence` and `rsa_hf::recurrence_backward`, one node each in a graph: the path taken inside depends on the
values of a mask, which a graph does not know. ONNX has no such operator; there P is built from plain operators.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rsa_hf.ops import cpp
from rsa_hf.ops.buffers import empty_output
from rsa_hf.ops.cpp.launch import cpp_backward, cpp_forward
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.pytorch import product_in_pytorch
from rsa_hf.ops.read_mask import read_mask
from rsa_hf.rem import KINDS, Rems, is_recorded, is_transformed

BACKENDS = ("pytorch", "cpp", "triton")
VARIABLE = "RSA_HF_BACKEND"

Gradients = tuple[Tensor | None, ...]  # of V, decay, θ, amplitude, attention's output and the gate


def apply_rems(
    value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """P V in the dtype it is computed in, [B, H, T, D]; or (1 − g) · attention + g · P V, [B, T, H', D].

    Args:
        value: V, [B, Hv, S, D].
        rems: the H heads.
        mask: which keys each query sees.
        attention: output of softmax attention to mix P V into, [B, T, H', D]: all heads of the layer, of which
            `rems.heads` are RSA heads; or None.
        gate: g of each RSA head, (H,); None without `attention`.
    """
    # Without autocast: decay powers and sums lose too much in half precision.
    with torch.autocast(value.device.type, enabled=False):
        if is_transformed() or (is_recorded() and torch.onnx.is_in_onnx_export()):
            return product_in_pytorch(value, rems, mask, attention, gate)
        tensors = (value, *rems.rates, attention, gate)
        if not is_recorded():
            path = _path(value, rems, mask, attention, gate)
            if path == "pytorch":
                return product_in_pytorch(value, rems, mask, attention, gate)
            result: Tensor = _ApplyRems.apply(*tensors, rems, mask, path)  # type: ignore[no-untyped-call]
            return result
        masks = (mask.unread_mask, mask.key_mask, mask.documents, mask.visible)
        kinds = [KINDS.index(kind) for kind in rems.kinds]
        heads = (kinds, list(rems.dilation), list(rems.heads), rems.num_key_value_groups)
        sizes = (mask.query_length, mask.query_offset, mask.causal, mask.sliding_window)
        output: Tensor = torch.ops.rsa_hf.recurrence(*tensors, *masks, *heads, *sizes)
        return output


# --- which code -----------------------------------------------------------------------------------------------------


def _path(value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None, gate: Tensor | None) -> str:
    """The backend, or `"pytorch"` where that does not take the mask."""
    backend = choose_backend(value, rems, attention, gate)
    if mask.has_few_queries or value.numel() == 0 or mask.visible is not None:
        return "pytorch"
    return "pytorch" if backend == "triton" and mask.sliding_window is not None else backend


def choose_backend(value: Tensor, rems: Rems, attention: Tensor | None = None, gate: Tensor | None = None) -> str:
    """One of BACKENDS: what RSA_HF_BACKEND says, else by device as above.

    Raises:
        ValueError: RSA_HF_BACKEND is none of BACKENDS.
        RuntimeError: RSA_HF_BACKEND is cpp or triton, which cannot run here.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", *BACKENDS):
        raise ValueError(f"{VARIABLE}={chosen!r}: choose from {', '.join(BACKENDS)}, or unset it for the default.")
    backend = chosen or {"cpu": "cpp", "cuda": "triton"}.get(value.device.type, "pytorch")
    if backend == "pytorch":
        return backend
    if backend == "cpp":
        reason = cpp.obstacle(value, attention, gate)
    else:
        from rsa_hf.ops.triton import obstacle

        reason = obstacle(value, rems, attention, gate)
    if reason is None:
        return backend
    if chosen:
        raise RuntimeError(f"{VARIABLE}={backend} cannot run: {reason}. Unset it, or choose pytorch.")
    if backend == "triton":
        _warn_once(f"RSA computes P V in plain PyTorch, not in Triton: {reason}.")
    return "pytorch"


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _forward(
    path: str, value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None, gate: Tensor | None
) -> Tensor:
    if path == "cpp":
        return cpp_forward(value, rems, mask, attention, gate)
    if path == "triton":
        from rsa_hf.ops.triton.launch import triton_forward

        return triton_forward(value, rems, mask, attention, gate)
    return product_in_pytorch(value, rems, mask, attention, gate)


def _backward(
    path: str,
    grad: Tensor,
    value: Tensor,
    rems: Rems,
    mask: AttentionMask,
    attention: Tensor | None,
    gate: Tensor | None,
) -> Gradients:
    """The gradients of `_forward`. Those by plain PyTorch can be differentiated again."""
    with torch.autocast(value.device.type, enabled=False):
        if path == "cpp":
            return cpp_backward(grad, value, rems, mask, attention, gate)
        if path == "triton":
            from rsa_hf.ops.triton.launch import triton_backward

            return triton_backward(grad, value, rems, mask, attention, gate)

        def product(tensors: dict[str, Tensor]) -> Tensor:
            rates = (tensors["decay"], tensors["theta"], tensors.get("amplitude"))
            mixed = (tensors.get("attention"), tensors.get("gate"))
            return product_in_pytorch(tensors["value"], rems.with_rates(*rates), mask, *mixed)

        names = ("value", "decay", "theta", "amplitude", "attention", "gate")
        tensors = dict(zip(names, (value, *rems.rates, attention, gate), strict=True))
        # Not by `torch.autograd`, which is off inside an operator.
        [gradients] = torch.func.vjp(product, {k: x for k, x in tensors.items() if x is not None})[1](grad)
        return tuple(gradients.get(name) for name in names)


# --- eager ----------------------------------------------------------------------------------------------------------


class _ApplyRems(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        decay: Tensor,
        theta: Tensor,
        amplitude: Tensor | None,
        attention: Tensor | None,
        gate: Tensor | None,
        rems: Rems,
        mask: AttentionMask,
        path: str,
    ) -> Tensor:
        ctx.save_for_backward(value, decay, theta, amplitude, attention, gate)
        ctx.rems, ctx.mask, ctx.path = rems, mask, path
        return _forward(path, value, rems, mask, attention, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        value, *rates, attention, gate = ctx.saved_tensors
        rems = ctx.rems.with_rates(*rates)  # with their graph
        path = "pytorch" if _is_differentiated_again(grad) else ctx.path
        return (*_backward(path, grad, value, rems, ctx.mask, attention, gate), None, None, None)


def _is_differentiated_again(grad: Tensor) -> bool:
    """Whether the result of this backward pass is part of a graph, or of a transform."""
    # `is_grads_batched=True` has a batch of its own kind.
    return torch.is_grad_enabled() or is_transformed() or torch._C._functorch.is_legacy_batchedtensor(grad)


# --- compiled and exported ------------------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor value, Tensor decay, Tensor theta, Tensor? amplitude, Tensor? attention, Tensor? gate, Tensor? mask, "
    "Tensor? key_mask, Tensor? documents, Tensor? visible, int[] kinds, int[] dilation, int[] heads, "
    "int num_key_value_groups, SymInt query_length, SymInt query_offset, bool causal, SymInt? sliding_window"
)


def _unflatten(*arguments: Any) -> tuple[Tensor, Rems, AttentionMask, Tensor | None, Tensor | None]:
    """The arguments of `_path` from those of the operator."""
    value, decay, theta, amplitude, attention, gate, mask, key_mask, documents, visible, *others = arguments
    kinds, dilation, heads, num_key_value_groups, query_length, query_offset, causal, window = others
    S = value.shape[2]
    if mask is None:
        mask = AttentionMask(query_length, S, query_offset, causal, key_mask, documents, window, visible)
    else:
        mask = read_mask(mask, query_length, S, causal)
    names = tuple(KINDS[kind] for kind in kinds)
    rems = Rems(names, decay, theta, tuple(dilation), num_key_value_groups, tuple(heads), amplitude)
    return value, rems, mask, attention, gate


# Not `torch.library.custom_op`, which looks for the source lines of what it registers among all modules: 40 ms.
_LIBRARY = torch.library.Library("rsa_hf", "DEF")
_LIBRARY.define(f"recurrence({_ARGUMENTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(
    f"recurrence_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(_LIBRARY, "recurrence", "CompositeExplicitAutograd")
def _operator(*arguments: Any) -> Tensor:
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "rsa_hf::recurrence, P V in an exported program, has no forward-mode derivative. Differentiate the model "
            "that was exported, or use backward mode."
        )
    problem = _unflatten(*arguments)
    return _laid_out_like(_forward(_path(*problem), *problem), empty_output(*problem[:4]))


@torch.library.impl(_LIBRARY, "recurrence", "Meta")
def _(*arguments: Any) -> Tensor:
    # Without the mask, which has no values to read here.
    return empty_output(*_unflatten(*arguments[:6], None, *arguments[7:])[:4])


@torch.library.impl(_LIBRARY, "recurrence_backward", "CompositeExplicitAutograd")
def _backward_operator(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    problem = _unflatten(*arguments)
    gradients = _backward(_path(*problem), grad, *problem)
    # An operator returns tensors (never None), with the strides that its fake implementation promises.
    return tuple(
        grad.new_empty(0) if gradient is None else _laid_out_like(gradient, torch.empty_like(tensor))
        for gradient, tensor in zip(gradients, arguments[:6], strict=True)
    )


def _laid_out_like(result: Tensor, promised: Tensor) -> Tensor:
    return result if result.stride() == promised.stride() else promised.copy_(result)


@torch.library.impl(_LIBRARY, "recurrence_backward", "Meta")
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in arguments[:6])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.others = inputs[10:]


def _differentiate(ctx: Any, grad: Tensor) -> Gradients:
    arguments = (*ctx.saved_tensors, *ctx.others)
    if _is_differentiated_again(grad):
        return (*_backward("pytorch", grad, *_unflatten(*arguments)), *[None] * 12)
    gradients = torch.ops.rsa_hf.recurrence_backward(grad, *arguments)
    present = (None if tensor is None else found for found, tensor in zip(gradients, arguments[:6], strict=True))
    return (*present, *[None] * 12)


torch.library.register_autograd("rsa_hf::recurrence", _differentiate, setup_context=_save, lib=_LIBRARY)
