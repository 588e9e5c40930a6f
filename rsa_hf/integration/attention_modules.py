"""Which modules are self-attention, told from their classes: nothing is run.

`patch_model` finds them by running the model. A checkpoint names them, and whoever wrote it may have named a
feed-forward layer, whose RSA heads would be loaded and never run; or cross-attention, which has no axis of time.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.integration.architectures import architecture_of

__all__ = ["may_have_heads"]

_KNOWN = ("torch", "transformers", "rsa_hf")
_ASKS = "get_interface"  # of `ALL_ATTENTION_FUNCTIONS`: who calls it hands itself to the attention function
_CROSS = re.compile(r"cross|encoder_?attn|encdec", re.IGNORECASE)


def may_have_heads(name: str, module: nn.Module) -> bool:
    """Whether RSA heads on a module would run in its self-attention.

    Known for the classes of torch, transformers and this package. Those of anyone else (`trust_remote_code`) may reach
    attention in ways of their own: the answer for them is yes.

    Args:
        name: the module's name in the model. Cross-attention is often of the same class as self-attention, and told
            apart by its name alone.
        module: the module.
    """
    kind: Any = type(module)
    if kind.__module__.partition(".")[0] not in _KNOWN:
        return True
    if isinstance(module, PreTrainedModel) or not (architecture_of(module) or _asks_for_attention(kind)):
        return False
    of_cross_attention = _CROSS.search(name.rpartition(".")[2]) or _CROSS.search(kind.__name__)
    return not (of_cross_attention or getattr(module, "is_cross_attention", False))


@functools.cache
def _asks_for_attention(cls: type) -> bool:
    """Whether a method of a class, or a function beside it that a method uses, asks for an attention function."""
    for owner in cls.__mro__:
        for member in vars(owner).values():
            method = _function(member)
            if method is None:
                continue
            names = set(_names(method.__code__))
            beside = [_function(method.__globals__.get(name)) for name in names]
            helpers = [f for f in beside if f is not None and f.__module__ == method.__module__]
            if _ASKS in names or any(_ASKS in _names(helper.__code__) for helper in helpers):
                return True
    return False


def _function(member: Any) -> FunctionType | None:
    """The function inside of decorators, if there is one."""
    if not callable(getattr(member, "__func__", member)):
        return None
    inner = inspect.unwrap(getattr(member, "__func__", member))
    return inner if isinstance(inner, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes that a function uses, with those of the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
