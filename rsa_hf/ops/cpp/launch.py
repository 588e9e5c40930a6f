"""Calls of the C++: P V and its gradients from a `Problem`."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rsa_hf.ops.buffers import copy_other_heads, empty_output, empty_rows, in_dtype, with_rows
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.problem import Learned, Problem
from rsa_hf.rem import other_heads, working_dtype

WORTH_A_THREAD = 2**15  # numbers
PROBLEM = struct.Struct("10q 4q q d q 20q 24q")  # `Problem` of scan.cpp
_NO_GRADIENTS = Learned(*[None] * 5)


def cpp_forward(problem: Problem) -> Tensor:
    """The output of a problem without `visible`."""
    function = "queries" if problem.mask.has_few_queries else "forward"
    dtype, output, attention = working_dtype(problem.value), empty_output(problem), problem.attention
    mixed = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
    if attention is not None:
        attention = in_dtype(attention, dtype)
        copy_other_heads(attention, mixed, problem.layout.heads)
    _call(function, dtype, problem, (attention, mixed, None, None), None, _NO_GRADIENTS)
    return in_dtype(mixed, output.dtype)


def cpp_backward(grad: Tensor, problem: Problem) -> tuple[Tensor | None, ...]:
    """The gradients of `problem.tensors`, from that of the output."""
    value, attention, learned, layout, num_key_value_groups, mask = problem
    dtype, seen = working_dtype(value), mask.seen_length
    dvalue = empty_rows(value, dtype)
    if seen < dvalue.shape[2]:
        dvalue[:, :, seen:] = 0
    if len(layout.heads) < dvalue.shape[1] * num_key_value_groups:
        for unread in other_heads(sorted({h // num_key_value_groups for h in layout.heads}), dvalue.shape[1]):
            dvalue[:, unread] = 0
    dattention = None
    if attention is not None:
        attention, dattention = in_dtype(attention, dtype), empty_rows(attention, dtype)
        copy_other_heads(grad, dattention, layout.heads)
    sums = Learned(*(None if tensor is None else torch.zeros_like(_as_read(tensor)) for tensor in learned))
    _call("backward", dtype, problem, (attention, None, in_dtype(grad, dtype), dattention), dvalue, sums)
    gradients = zip((dvalue, dattention, *sums), problem.tensors, strict=True)
    return tuple(None if x is None or of is None else in_dtype(x, of.dtype) for x, of in gradients)


def _call(
    function: str,
    dtype: torch.dtype,
    problem: Problem,
    layers: tuple[Tensor | None, ...],
    dvalue: Tensor | None,
    sums: Learned,
) -> None:
    """Call `"forward"`, `"queries"` or `"backward"` for numbers of a dtype, that of all tensors but the problem's own.

    `layers` are attention, output, grad and dattention, [B, T, H, D] each, without attention [B, H, T, D]; `dvalue` is
    written, and `sums`, the gradients of what is learned, are added to.
    """
    value, attention, learned, layout, num_key_value_groups, mask = problem
    B, _, _, D = value.shape
    R, keys, window = len(layout.rows), mask.seen_length, mask.sliding_window
    described, keep = integers(layout.numbers), []  # alive until the call returns
    numbers: list[float | None] = [
        *(B, R, keys, mask.query_length, D, mask.query_offset, num_key_value_groups, mask.causal),
        max(1, min(torch.get_num_threads(), B * R * keys * D // WORTH_A_THREAD)),
        0 if window is None or window >= keys else window,
    ]
    for rows, of_rows in ((mask.key_mask, torch.bool), (mask.documents, torch.int64)):  # [B or 1, S]
        if rows is None:
            numbers += (0, 0)
        else:
            keep.append(rows := rows.to(of_rows).contiguous())
            numbers += (rows.data_ptr(), 0 if len(rows) == 1 else rows.shape[1])
    numbers += (ctypes.addressof(described), layout.scale, layout.num_free_lags)
    for tensor in (*learned, *sums):
        if tensor is None:
            numbers += (0, 0)
        else:
            keep.append(tensor := _as_read(tensor))
            numbers += (tensor.data_ptr(), tensor.dtype == torch.float64)
    is_layer = attention is not None
    for tensor, positions_first in (
        (in_dtype(value, dtype), False),
        *((x, is_layer) for x in layers),
        (dvalue, False),
    ):
        if tensor is None:
            numbers += (0, 0, 0, 0)
        else:
            keep.append(tensor := with_rows(tensor))
            row, head, position, _ = tensor.stride()
            numbers += (tensor.data_ptr(), row, *((position, head) if positions_first else (head, position)))
    compiled_function(function, dtype)(PROBLEM.pack(*numbers))


def _as_read(learned: Tensor) -> Tensor:
    """What is learned as the C++ reads it: contiguous, in float64 or float32."""
    if learned.dtype not in (torch.float32, torch.float64):
        learned = learned.float()
    return with_rows(learned)


@functools.lru_cache(maxsize=256)
def integers(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Whole numbers as the C++ reads them; it does not write to them."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.cache
def compiled_function(name: str, dtype: torch.dtype) -> Callable[[Any], None]:
    """A function of scan.cpp for numbers of a dtype; it takes a structure as bytes."""
    compiled = library()
    assert isinstance(compiled, ctypes.CDLL)
    function = getattr(compiled, f"{name}_{str(dtype).removeprefix('torch.')}")
    function.restype = None
    return function  # type: ignore[no-any-return]
