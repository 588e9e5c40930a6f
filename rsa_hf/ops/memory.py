"""Tensors as compiled code reads and writes them: with contiguous channels."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["empty_rows", "with_rows"]


def with_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with contiguous channels."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_rows(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor with contiguous channels, in the memory order of `like` if that has contiguous channels."""
    kept = like.stride(-1) == 1
    format = torch.preserve_format if kept else torch.contiguous_format
    return torch.empty_like(like, dtype=dtype, memory_format=format)
