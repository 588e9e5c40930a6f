"""What an adapter is, and how it wraps a method of a class of transformers, once in a process."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rsa_hf.heads import heads_of
from rsa_hf.integration.architectures.mixing import is_watched, mix_recurrence
from rsa_hf.utils.versions import what_fits

__all__ = ["Architecture", "Run", "require_attributes", "wrap_class"]

Run = Callable[[Any, Callable[..., Any], dict[str, Any], Callable[..., Tensor]], Any]


@dataclass(frozen=True)
class Architecture:
    """One class of attention modules.

    Attributes:
        module: the module of transformers that defines it, below `transformers.models`.
        name: the class.
        method: its method that is wrapped.
        parameters: of that method, by which Q, K, V, the cache or the mask are known.
        attributes: of the instances, which the wrapper reads or stands in for.
        run: takes the attention module, the method, its arguments by name, and `mix`; runs the method, with what
            `mix` returns in place of the output of attention.
    """

    module: str
    name: str
    method: str
    parameters: tuple[str, ...]
    attributes: tuple[str, ...]
    run: Run = field(repr=False)

    @property
    def path(self) -> str:
        """The full name of the module."""
        return f"transformers.models.{self.module}"


def require_attributes(architecture: Architecture, module: nn.Module) -> None:
    """Check that a module has what its adapter reads.

    Raises:
        RuntimeError: it has not; the message names the transformers versions that fit.
    """
    missing = [name for name in architecture.attributes if not hasattr(module, name)]
    if missing:
        raise RuntimeError(_unexpected(architecture, f"to have {', '.join(architecture.attributes)}", missing))


def wrap_class(architecture: Architecture) -> None:
    """Wrap the method of an adapter's class; does nothing where it is wrapped.

    Raises:
        RuntimeError: the method is not as expected; the message names the transformers versions that fit.
    """
    cls = getattr(importlib.import_module(architecture.path), architecture.name)
    original = vars(cls).get(architecture.method)
    if hasattr(original, "_rsa_hf_architecture"):
        return
    names = list(inspect.signature(original).parameters)[1:] if callable(original) else []
    missing = [name for name in architecture.parameters if name not in names]
    if not callable(original) or missing:
        wanted = f"{architecture.method}({', '.join(architecture.parameters)})"
        raise RuntimeError(_unexpected(architecture, f"to define {wanted}", missing or [architecture.method]))

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if heads_of(self) is None and not is_watched():
            return original(self, *args, **keywords)
        call = dict(zip(names, args, strict=False)) | keywords
        return architecture.run(self, original, call, functools.partial(mix_recurrence, self))

    method._rsa_hf_architecture = architecture  # type: ignore[attr-defined]
    setattr(cls, architecture.method, method)


def _unexpected(architecture: Architecture, expected: str, missing: list[str]) -> str:
    return (
        f"{what_fits()} {architecture.path}.{architecture.name} was expected {expected}, but {', '.join(missing)} is "
        "missing. Install a transformers version that rsa_hf was tested with, or a newer rsa_hf."
    )
