"""`Hook`, one function of another library that rsa_hf replaces, and the installation of a list of hooks."""

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Hook:
    """One function of another library that is replaced by a wrapper.

    `wrap` takes the original function and returns its replacement, which names the parameters that it relies on.
    """

    owner: str  # the class or module that holds the function, as "package.module:Class" or "package.module"
    name: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    purpose: str  # what the hook does, as an infinitive
    essential: bool = True  # if this hook does not fit, none of the list is installed

    def __str__(self) -> str:
        return f"{self.owner.rpartition(':')[2].rpartition('.')[2]}.{self.name}"


def is_installed(hook: Hook) -> bool:
    """Whether a hook is in place."""
    try:
        owner = pkgutil.resolve_name(hook.owner)
    except (ImportError, AttributeError):
        return False
    return hook.wrap in getattr(getattr(owner, hook.name, None), "_rsa_hf_wrappers", ())


def install_hooks(hooks: Sequence[Hook], supported: str) -> None:
    """Install the hooks that are not in place yet: all essential ones or, if one of those does not fit, none at all.

    A hook does not fit if its function is missing, or lacks a parameter. An essential hook then raises an ImportError;
    any other is left out, with a warning. `supported` is a sentence for messages: which versions are supported.
    """
    replacements = []
    for hook in hooks:
        if is_installed(hook):
            continue
        try:
            replacements.append((hook, *_replacement(hook)))
        except (ImportError, AttributeError) as error:
            problem = (
                f"{supported} {hook} does not fit: {error}. Install a version that rsa_hf was tested with, or a newer "
                "rsa_hf."
            )
            if hook.essential:
                raise ImportError(problem) from error
            logger.warning("%s Until then it does not %s.", problem, hook.purpose)
    for hook, owner, replacement in replacements:
        setattr(owner, hook.name, replacement)


def _replacement(hook: Hook) -> tuple[Any, Any]:
    """The owner of a hooked function, and the function's replacement."""
    owner = pkgutil.resolve_name(hook.owner)
    static = inspect.getattr_static(owner, hook.name, None)
    function = getattr(static, "__func__", static)
    if not callable(function):
        raise AttributeError(f"{hook} is missing")
    replacement: Any = hook.wrap(function)
    found = list(inspect.signature(function).parameters)
    needed = [each.name for each in inspect.signature(replacement).parameters.values() if each.kind not in _VARIABLE]
    if not set(needed) <= set(found):
        raise AttributeError(f"{hook} was expected to take ({', '.join(needed)}), but takes ({', '.join(found)})")
    functools.update_wrapper(replacement, function)
    replacement._rsa_hf_wrappers = (*getattr(function, "_rsa_hf_wrappers", ()), hook.wrap)
    return owner, type(static)(replacement) if isinstance(static, (staticmethod, classmethod)) else replacement
