"""Tensors as the Triton kernels and the operators read and write them: with contiguous channels."""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.ops.problem import Problem
from rsa_hf.rem import other_heads, working_dtype


def with_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with contiguous channels."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_rows(like: Tensor) -> Tensor:
    """An empty tensor with contiguous channels, in the memory order of `like` if that has contiguous channels."""
    kept = like.stride(-1) == 1
    format = torch.preserve_format if kept else torch.contiguous_format
    return torch.empty_like(like, memory_format=format)


def empty_output(problem: Problem) -> Tensor:
    """An empty tensor of the shape, dtype and layout of the output."""
    value = problem.value
    if problem.attention is not None:
        return torch.empty_like(problem.attention, memory_format=torch.contiguous_format)
    shape = (len(value), len(problem.layout.rows), problem.mask.query_length, value.shape[3])
    return value.new_empty(shape, dtype=working_dtype(value))


def copy_other_heads(layer: Tensor, into: Tensor, heads: tuple[int, ...]) -> None:
    """Copy the plain heads of [B, T, H, D]."""
    if len(heads) < layer.shape[2]:
        for plain in other_heads(heads, layer.shape[2]):
            into[:, :, plain] = layer[:, :, plain]
