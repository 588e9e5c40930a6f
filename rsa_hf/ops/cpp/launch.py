"""Calls of the C++: P V and its gradients from tensors and an `AttentionMask`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rsa_hf.ops.buffers import copy_other_heads, empty_output, empty_rows, with_rows
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.rem import KINDS, Rems, other_heads, working_dtype

WORTH_A_THREAD = 2**15  # numbers


class _Positions(ctypes.Structure):
    """`Tensor` of scan.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "head", "position")),
    )


class _Problem(ctypes.Structure):
    """`Problem` of scan.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("rows", "heads", "keys", "queries", "channels", "query_offset"),
                *("num_key_value_groups", "is_causal", "threads", "window"),
            )
        ),
        *((name, ctypes.c_void_p) for name in ("kinds", "dilation", "indices", "decay", "theta", "amplitude", "gate")),
        ("key_mask", ctypes.c_void_p),
        ("key_mask_row", ctypes.c_int64),
        ("documents", ctypes.c_void_p),
        ("documents_row", ctypes.c_int64),
        *((name, _Positions) for name in ("value", "attention", "output", "grad", "dvalue", "dattention")),
        ("sums", ctypes.c_void_p),
    )


def cpp_forward(
    value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None, gate: Tensor | None
) -> Tensor:
    """P V, [B, H, T, D]; or, with `attention`, (1 − g) · attention + g · P V, [B, T, H', D].

    Args:
        value: shape [B, Hv, S, D].
        rems: the heads.
        mask: which keys each query sees; without `visible`.
        attention: attention's output, or None.
        gate: g of each head, or None.
    """
    dtype = working_dtype(value)
    output = empty_output(value, rems, mask, attention)
    if attention is None:
        _call("forward", dtype, rems, mask, None, value=value.to(dtype), output=output)
        return output
    attention = attention.to(dtype)
    mixed = output if output.dtype == dtype else output.new_empty(output.shape, dtype=dtype)
    copy_other_heads(attention, mixed, rems)
    heads = {"attention": attention.transpose(1, 2), "output": mixed.transpose(1, 2)}
    _call("forward", dtype, rems, mask, gate, value=value.to(dtype), **heads)
    return mixed.to(output.dtype)


def cpp_backward(
    grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None, gate: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of `cpp_forward` with respect to V, the rates, attention and gate, from that of its output."""
    H, dtype, S = len(rems.heads), working_dtype(value), mask.seen_length
    dvalue = empty_rows(value, dtype)
    dvalue[:, :, S:] = 0
    for unread in other_heads(sorted({head // rems.num_key_value_groups for head in rems.heads}), dvalue.shape[1]):
        dvalue[:, unread] = 0
    sums = value.new_empty(len(value), H, 5, dtype=torch.float64)
    tensors, dattention = {"value": value.to(dtype), "dvalue": dvalue}, None
    if attention is not None:
        dattention = empty_rows(attention, dtype)
        copy_other_heads(grad, dattention, rems)
        tensors["attention"] = attention.to(dtype).transpose(1, 2)
        tensors["dattention"] = dattention.transpose(1, 2)
        grad = grad.transpose(1, 2)
    _call("backward", dtype, rems, mask, gate, sums, grad=grad.to(dtype), **tensors)
    ddecay, dtheta, damplitude, dgate = sums.sum(0).to(rems.decay.dtype).split((1, 1, 2, 1), 1)
    rates = (ddecay[:, 0], dtheta[:, 0], None if rems.amplitude is None else damplitude)
    if attention is None or gate is None or dattention is None:
        return dvalue.to(value.dtype), *rates, None, None
    return dvalue.to(value.dtype), *rates, dattention.to(attention.dtype), dgate[:, 0].to(gate.dtype)


def _call(
    function: str,
    dtype: torch.dtype,
    rems: Rems,
    mask: AttentionMask,
    gate: Tensor | None,
    sums: Tensor | None = None,
    **tensors: Tensor,
) -> None:
    B, _, _, D = tensors["value"].shape
    kinds, dilation, indices = map(integers, (_numbers(rems.kinds), rems.dilation, rems.heads))
    keep: list[Tensor] = []  # alive until the call returns

    def address(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
        if tensor is None:
            return None
        keep.append(tensor.detach().to(dtype).contiguous())
        return keep[-1].data_ptr()

    def rows(tensor: Tensor | None, dtype: torch.dtype) -> tuple[int | None, int]:
        """Address and stride of the rows of [B or 1, S]."""
        return address(tensor, dtype), 0 if tensor is None or len(tensor) == 1 else tensor.shape[1]

    def positions(tensor: Tensor) -> _Positions:
        keep.append(with_rows(tensor))
        return _Positions(keep[-1].data_ptr(), *keep[-1].stride()[:3])

    key_mask, key_mask_row = rows(mask.key_mask, torch.bool)
    documents, documents_row = rows(mask.documents, torch.int64)
    keys = mask.seen_length
    problem = _Problem(
        rows=B,
        heads=len(rems.heads),
        keys=keys,
        queries=mask.query_length,
        channels=D,
        query_offset=mask.query_offset,
        num_key_value_groups=rems.num_key_value_groups,
        is_causal=mask.causal,
        threads=max(1, min(torch.get_num_threads(), B * len(rems.heads) * keys * D // WORTH_A_THREAD)),
        window=0 if mask.sliding_window is None or mask.sliding_window >= keys else mask.sliding_window,
        kinds=ctypes.addressof(kinds),
        dilation=ctypes.addressof(dilation),
        indices=ctypes.addressof(indices),
        decay=address(rems.decay, torch.float64),
        theta=address(rems.theta, torch.float64),
        amplitude=address(rems.amplitude, torch.float64),
        gate=address(gate, torch.float64),
        key_mask=key_mask,
        key_mask_row=key_mask_row,
        documents=documents,
        documents_row=documents_row,
        sums=address(sums, torch.float64),
        **{name: positions(tensor) for name, tensor in tensors.items()},
    )
    compiled_function(function, dtype)(ctypes.byref(problem))


@functools.lru_cache(maxsize=256)
def integers(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Whole numbers as the C++ reads them; it does not write to them."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.lru_cache(maxsize=64)
def _numbers(kinds: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(map(KINDS.index, kinds))


@functools.cache
def compiled_function(name: str, dtype: torch.dtype) -> Callable[[Any], None]:
    """A function of scan.cpp for numbers of a dtype; it takes a structure, by reference or as bytes."""
    compiled = library()
    assert isinstance(compiled, ctypes.CDLL)
    function = getattr(compiled, f"{name}_{str(dtype).removeprefix('torch.')}")
    function.restype = None
    return function  # type: ignore[no-any-return]
