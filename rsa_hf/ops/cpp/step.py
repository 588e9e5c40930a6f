"""A step of generation in one call of the C++: eq. 4 for a single query after cached keys.

Between two steps of a generation the model's weights pass through the processor's caches, so each operation and each
line of Python is read from memory again. One call costs less than the operations of `ops/decode.py`, though they
compute little.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rsa_hf.ops.cpp.launch import compiled_function, integers
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.rem import Rems

STEP = struct.Struct("25q")  # `Step` of scan.cpp


class CppStep:
    """(1 − g) · attention + g · P V of one query, from weights that are kept from step to step.

    Args:
        weights: f(τ) of every head at the lags 0, 1, …, [H, L].
        reach: for each head the lag beyond which nothing matters, below L.
        rems: the heads; their rates are not read.
        gate: g of each head, (H,).
    """

    def __init__(self, weights: Tensor, reach: Sequence[int], rems: Rems, gate: Tensor) -> None:
        described = [integers(tuple(numbers)) for numbers in (rems.dilation, reach, rems.heads)]
        gate = gate.detach().double().contiguous()
        self.memory = (*described, weights, gate)  # alive as long as their addresses are used
        self.dtype, self.heads, self.num_key_value_groups = weights.dtype, len(weights), rems.num_key_value_groups
        addresses = map(ctypes.addressof, described)
        self.described = (*addresses, weights.data_ptr(), weights.stride(0), gate.data_ptr())
        self.run: Any = compiled_function("step", self.dtype)

    def fits(self, attention: Tensor, value: Tensor, mask: AttentionMask) -> bool:
        """Whether the step can be computed: a causal query, no mask of single keys, and tensors as the C++ reads them.

        There must be no graph.
        """
        return (
            mask.query_length == 1 < mask.key_length
            and mask.causal
            and mask.key_mask is None
            and mask.visible is None
            and type(attention) is type(value) is Tensor
            and attention.dtype == value.dtype == self.dtype
            and attention.stride(3) == value.stride(3) == 1
            and value.shape[2] == mask.key_length
            and attention.shape[1] == 1
        )

    def __call__(self, attention: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        """The mixed output, [B, 1, H', D], from attention's and V, [B, Hv, S, D]."""
        B, _, H, D = attention.shape
        position, window = mask.query_offset, mask.sliding_window
        farthest = position if window is None else min(position, window - 1)
        output = torch.empty_like(attention, memory_format=torch.contiguous_format)
        row, _, head, _ = attention.stride()
        v_row, v_head, v_position, _ = value.stride()
        self.run(
            STEP.pack(
                *(B, self.heads, H, self.num_key_value_groups, D, position, farthest),
                *self.described,
                *(value.data_ptr(), v_row, v_head, v_position),
                *(attention.data_ptr(), row, head, 0),
                *(output.data_ptr(), H * D, D, 0),
            )
        )
        return output
