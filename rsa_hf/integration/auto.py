"""Hooks into the Auto classes: our own models are found by their `model_type`, and imported only then.

`_LazyConfigMapping.__getitem__` and `__contains__` are what every Auto class asks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rsa_hf.models import register

__all__ = ["wrap_lookup"]


def wrap_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Import a model type of ours when an Auto class asks for it."""

    def lookup(self: Any, key: Any) -> Any:
        register(key)
        return original(self, key)

    return lookup
