"""The REMs that a calibration tries on every head, and their weights by lag."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from rsa_hf.rem import lag_weights

__all__ = ["DICTIONARY", "Rem", "unit_weights"]


class Rem(NamedTuple):
    """A REM with fixed rates: its kind, λ or γ, θ in radians and d."""

    kind: str
    decay: float
    theta: float
    dilation: int


_SIZES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_ANGLES = (math.pi / 8, math.pi / 4, math.pi / 2, 3 * math.pi / 4)

# Regular heads of both signs, cyclical pairs, and regular heads that see every d-th position.
DICTIONARY = (
    *(Rem("regular", sign * size, 0.0, 1) for sign in (1, -1) for size in _SIZES),
    *(Rem("regular", size, 0.0, 1) for size in (0.95, 0.98, 0.99)),
    *(
        Rem(kind, size, angle, 1)
        for size, angle, kind in itertools.product((0.5, 0.7, 0.85, 0.95, 0.98), _ANGLES, ("cos", "sin"))
    ),
    *(Rem("regular", size, 0.0, d) for size, d in itertools.product((0.3, 0.6, 0.9), (2, 3, 4, 8))),
)


def unit_weights(length: int) -> tuple[Tensor, Tensor]:
    """f(τ) of every REM of the dictionary at the lags 0 … length − 1, divided by its mass Σ |f(τ)|; and the masses.

    Unscaled, slow REMs could not be compared with fast ones: at λ = 0.99 the weights of a row of P sum to 99. A REM
    that reaches no lag below `length` has mass 0 and weights 0.

    Returns:
        [P, length] and [P], both float64.
    """
    lags = torch.arange(length, device="cpu")

    def weights_of(rem: Rem) -> Tensor:
        decay, theta = torch.tensor([rem.decay, rem.theta], dtype=torch.float64, device="cpu")
        return lag_weights(rem.kind, decay, theta, lags, rem.dilation)

    weights = torch.stack([weights_of(rem) for rem in DICTIONARY])
    mass = weights.abs().sum(1)
    return weights / mass.clamp(min=torch.finfo(mass.dtype).tiny)[:, None], mass
