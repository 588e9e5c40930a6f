"""How a function of another library is replaced: after a look at its parameters, all hooks or none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ADVICE", "Hook", "is_in_place", "replace_all"]

ADVICE = "Install a version that rsa_hf was tested with, or a newer rsa_hf."
_INHERITED = object()


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
        ImportError: a function is missing, has not the expected parameters, or cannot be replaced.
    """
    replacements: list[tuple[Hook, Any]] = []
    for hook in hooks:
        static = inspect.getattr_static(hook.owner, hook.name, None)
        function = getattr(static, "__func__", static)
        found = list(inspect.signature(function).parameters) if callable(function) else None
        if found is None or [name for name in hook.parameters if name not in found]:
            problem = "is missing" if found is None else f"takes ({', '.join(found)})"
            raise ImportError(
                f"{fits} {hook.owner.__name__}.{hook.name} was expected to take ({', '.join(hook.parameters)}), but "
                f"{problem}. {ADVICE}"
            )
        replacement: Any = functools.wraps(function)(hook.wrap(function))
        replacement._rsa_hf_hook = True
        kind = type(static) if isinstance(static, (staticmethod, classmethod)) else None
        replacements.append((hook, kind(replacement) if kind else replacement))
    replaced: list[tuple[Hook, Any]] = []
    try:
        for hook, new in replacements:
            before = vars(hook.owner).get(hook.name, _INHERITED)
            setattr(hook.owner, hook.name, new)
            replaced.append((hook, before))
    except (AttributeError, TypeError) as error:
        for done, before in reversed(replaced):
            if before is _INHERITED:
                delattr(done.owner, done.name)
            else:
                setattr(done.owner, done.name, before)
        raise ImportError(f"{fits} {hook.owner.__name__}.{hook.name} cannot be replaced: {error}. {ADVICE}") from error
