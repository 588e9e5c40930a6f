"""What eq. 4 adds to P V, and the gradients of both: the types that the paths computing P V share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["Gradients", "SoftmaxBranch"]


@dataclass(frozen=True, eq=False)
class SoftmaxBranch:
    """The softmax half of eq. 4 and the gate, to mix P V into.

    Attributes:
        attention: output of softmax attention, [B, T, H', D]: all heads of the layer, of which `Rems.heads` are RSA
            heads.
        gate: g of each head, shape (H,).
    """

    attention: Tensor
    gate: Tensor


class Gradients(NamedTuple):
    """Gradients with respect to V, λ or γ, θ and, where P V is mixed in, attention's output and the gate."""

    value: Tensor
    decay: Tensor
    theta: Tensor
    attention: Tensor | None = None
    gate: Tensor | None = None
