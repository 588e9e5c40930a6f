"""How far apart the outputs of two runs are, and what counts as apart."""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.cli.doctor_model.subject import Streams

__all__ = ["NOTHING", "TOLERANCE", "distance", "same_bits", "share_of", "size"]

TOLERANCE = 2e-3  # of RSA's effect
NOTHING = 1e-4  # share of the outputs that rounding may change


def same_bits(found: Streams, expected: Streams) -> bool:
    """Whether all streams agree bit for bit."""
    return all(torch.equal(found[name], expected[name]) for name in expected)


def share_of(found: Streams, expected: Streams) -> float:
    """The largest distance of a stream, as a share of its size."""
    return max(distance(found[name], expected[name]) / size(expected[name]) for name in expected)


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, in float64."""
    return size(found.double() - expected.double())


def size(values: Tensor) -> float:
    """The norm, in float64."""
    return float(values.double().norm())
