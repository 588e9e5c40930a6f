"""Tensors as compiled code reads and writes them: with contiguous channels."""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask
from rsa_hf.rem import Rems, other_heads, working_dtype


def with_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with contiguous channels."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_rows(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor with contiguous channels, in the memory order of `like` if that has contiguous channels."""
    kept = like.stride(-1) == 1
    format = torch.preserve_format if kept else torch.contiguous_format
    return torch.empty_like(like, dtype=dtype, memory_format=format)


def empty_output(value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None) -> Tensor:
    """An empty tensor of the shape, dtype and layout of P V; with attention's output, of eq. 4."""
    if attention is not None:
        return torch.empty_like(attention, memory_format=torch.contiguous_format)
    shape = (len(value), len(rems.heads), mask.query_length, value.shape[3])
    return value.new_empty(shape, dtype=working_dtype(value))


def copy_other_heads(layer: Tensor, into: Tensor, rems: Rems) -> None:
    """Copy the plain heads of [B, T, H', D]."""
    for plain in other_heads(rems.heads, layer.shape[2]):
        into[:, :, plain] = layer[:, :, plain]
