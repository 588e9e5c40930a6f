"""Hooks into the Auto classes: our own models are found by their `model_type`, and imported only then.

`_LazyConfigMapping.__getitem__` and `__contains__` are what every Auto class asks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.models.auto.configuration_auto import _LazyConfigMapping

from rsa_hf.integration.hooks import Hook
from rsa_hf.models import register

__all__ = ["HOOKS"]


def _wrap_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def lookup(self: Any, key: Any) -> Any:
        register(key)
        return original(self, key)

    return lookup


HOOKS = (
    Hook(_LazyConfigMapping, "__getitem__", ("self", "key"), _wrap_lookup),
    Hook(_LazyConfigMapping, "__contains__", ("self", "item"), _wrap_lookup),
)
