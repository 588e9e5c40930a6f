"""What the paths that compute P V are given, beside the values and the geometry."""

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
        heads_per_value: how many heads share a value head; head h reads value head h // groups.
    """

    kinds: tuple[str, ...]
    decay: Tensor
    theta: Tensor
    dilation: tuple[int, ...]
    heads_per_value: int


@dataclass(frozen=True, eq=False)
class SoftmaxBranch:
    """The other half of paper eq. 4, where the product is to be mixed with softmax attention.

    Attributes:
        attention: softmax attention's output, [B, T, H', D] with H' ≥ H; the heads from H on are plain.
        gate: g of each head, shape (H,).
    """

    attention: Tensor
    gate: Tensor


class ProductGradients(NamedTuple):
    """Gradients with respect to what P V is made of, each of the shape of what it belongs to."""

    value: Tensor
    decay: Tensor
    theta: Tensor


class Gradients(NamedTuple):
    """The same, and of what P V is mixed with."""

    value: Tensor
    decay: Tensor
    theta: Tensor
    attention: Tensor | None
    gate: Tensor | None


def working_dtype(value: Tensor) -> torch.dtype:
    """float64 for float64 values, else float32: decay powers and sums lose too much in half precision."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no other: for rates, of which float32 holds too few near ±1."""
    return torch.float32 if device.type == "mps" else torch.float64


def keys_of_heads(value: Tensor, rems: Rems) -> Tensor:
    """V of every head, in the dtype to compute in: [B, H, S, D]."""
    H = len(rems.kinds)
    keys = value[:, : -(-H // rems.heads_per_value)]
    if rems.heads_per_value > 1:
        keys = keys.repeat_interleave(rems.heads_per_value, dim=1)[:, :H]
    return keys.to(working_dtype(value))


def to_value_heads(dkeys: Tensor, value: Tensor, heads_per_value: int) -> Tensor:
    """The gradient of V, [B, Hv, S, D], from that of every head's."""
    # Summed before it is rounded: in half precision a part of the sum may leave the range that the sum stays in.
    dvalue = torch.zeros_like(value, dtype=dkeys.dtype)
    shared = torch.arange(dkeys.shape[1], device=value.device) // heads_per_value
    return dvalue.index_add_(1, shared, dkeys).to(value.dtype)
