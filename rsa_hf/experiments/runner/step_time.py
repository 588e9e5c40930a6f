"""How long a training step of one model takes beside another's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["step_time_ratio"]


def step_time_ratio(model: nn.Module, other: nn.Module, batch: Mapping[str, Tensor], rounds: int = 7) -> float:
    """Time of a forward and backward over that of another model, the median of rounds in which both take turns.

    Taking turns, both have the same of whatever else the machine does. A round before them does not count.

    Args:
        model: returns a loss.
        other: likewise.
        batch: what both are called with, on the device of both.
        rounds: how many, at least 1.
    """
    times = [(_step_time(model, batch), _step_time(other, batch)) for _ in range(1 + rounds)]
    return statistics.median(mine / its for mine, its in times[1:])


def _step_time(model: nn.Module, batch: Mapping[str, Tensor]) -> float:
    model.train()
    start = time.perf_counter()
    model(**batch).loss.backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds
