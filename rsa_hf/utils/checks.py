"""Checks of single settings."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["check_integer"]


def check_integer(name: str, value: Any, low: int, high: float = math.inf) -> None:
    """Raise a ValueError if a setting is not a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        allowed = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name} is {value!r}; choose a whole number {allowed}")
