"""How a function of another library is replaced: after a look at its parameters, all hooks or none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Hook", "is_in_place", "replace_all"]


@dataclass(frozen=True)
class Hook:
    """One function of another library that is replaced, and the parameters it is expected to have."""

    owner: Any  # a class or a module
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


def is_in_place(hook: Hook) -> bool:
    """Whether a hook is installed."""
    return hasattr(getattr(hook.owner, hook.name, None), "_rsa_hf_hook")


def replace_all(hooks: Sequence[Hook], fits: str) -> None:
    """Put every hook in its place or, where one does not fit, none of them.

    Args:
        hooks: what to replace.
        fits: which versions of the library fit, for the message.

    Raises:
        ImportError: a function is missing or has not the expected parameters.
    """
    originals = []
    for hook in hooks:
        static = inspect.getattr_static(hook.owner, hook.name, None)
        function = getattr(static, "__func__", static)
        found = list(inspect.signature(function).parameters) if callable(function) else None
        if found is None or [name for name in hook.parameters if name not in found]:
            raise ImportError(
                f"{fits} {hook.owner.__name__}.{hook.name} was expected to take ({', '.join(hook.parameters)}), but "
                f"{'is missing' if found is None else 'takes (' + ', '.join(found) + ')'}. Install a version that "
                "rsa_hf was tested with, or a newer rsa_hf."
            )
        originals.append((hook, static, function))
    for hook, static, function in originals:
        replacement = functools.wraps(function)(hook.wrap(function))
        replacement._rsa_hf_hook = True  # type: ignore[attr-defined]
        kind = type(static) if isinstance(static, (staticmethod, classmethod)) else None
        setattr(hook.owner, hook.name, kind(replacement) if kind else replacement)
