"""The types that the paths computing P V share, beside `AttentionMask`; and the dtypes they compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Gradients",
    "ProductGradients",
    "Rems",
    "SoftmaxBranch",
    "keys_of_heads",
    "to_value_heads",
    "widest_dtype",
    "working_dtype",
]


@dataclass(frozen=True, eq=False)
class Rems:
    """The REMs of H heads.

    Attributes:
        kinds: `"regular"`, `"cos"` or `"sin"`, of length H.
        decay: λ or γ, shape (H,).
        theta: θ in radians, shape (H,); not read for regular heads.
        dilation: d, of length H.
        heads_per_value: number of heads per value head (transformers' `num_key_value_groups`); head h reads value head
            h // heads_per_value.
    """

    kinds: tuple[str, ...]
    decay: Tensor
    theta: Tensor
    dilation: tuple[int, ...]
    heads_per_value: int


@dataclass(frozen=True, eq=False)
class SoftmaxBranch:
    """The softmax half of eq. 4 and the gate, to mix P V into.

    Attributes:
        attention: output of softmax attention, [B, T, H', D] with H' ≥ H; the heads from H on are plain.
        gate: g of each head, shape (H,).
    """

    attention: Tensor
    gate: Tensor


class ProductGradients(NamedTuple):
    """Gradients with respect to V, λ or γ, and θ, each of the shape of its tensor."""

    value: Tensor
    decay: Tensor
    theta: Tensor


class Gradients(NamedTuple):
    """The same, and with respect to attention's output and the gate."""

    value: Tensor
    decay: Tensor
    theta: Tensor
    attention: Tensor | None
    gate: Tensor | None


def working_dtype(value: Tensor) -> torch.dtype:
    """float64 for float64 values, else float32: decay powers and sums lose too much in half precision."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def widest_dtype(device: torch.device) -> torch.dtype:
    """The dtype of rates: float64, or float32 on devices without it. float32 is too coarse near ±1."""
    return torch.float32 if device.type == "mps" else torch.float64


def keys_of_heads(value: Tensor, rems: Rems) -> Tensor:
    """V of every head in the working dtype: [B, H, S, D]."""
    H = len(rems.kinds)
    keys = value[:, : -(-H // rems.heads_per_value)]
    if rems.heads_per_value > 1:
        keys = keys.repeat_interleave(rems.heads_per_value, dim=1)[:, :H]
    return keys.to(working_dtype(value))


def to_value_heads(dkeys: Tensor, value: Tensor, heads_per_value: int) -> Tensor:
    """The gradient of V, [B, Hv, S, D], from the gradient of every head's V."""
    # Summed before rounding: a term may overflow half precision although the sum does not.
    dvalue = torch.zeros_like(value, dtype=dkeys.dtype)
    shared = torch.arange(dkeys.shape[1], device=value.device) // heads_per_value
    return dvalue.index_add_(1, shared, dkeys).to(value.dtype)
