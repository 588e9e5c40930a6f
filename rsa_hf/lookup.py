"""Where a model keeps its RSA heads, with PEFT's wrappers round them or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from rsa_hf.config import HeadPlan
from rsa_hf.heads import RSAHeads

__all__ = ["heads_in_force", "heads_of", "holds_copies"]


def heads_of(module: nn.Module) -> RSAHeads | None:
    """The RSA heads of an attention module, its child `rsa`; None where it has none."""
    rsa = module._modules.get("rsa")
    # By its plan, not its class: PEFT puts a wrapper there that passes attributes on.
    return cast(RSAHeads, rsa) if isinstance(getattr(rsa, "plan", None), HeadPlan) else None


def holds_copies(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper round RSA heads: the heads as patched, and a copy for each adapter."""
    return isinstance(module._modules.get("original_module"), RSAHeads)


def heads_in_force(model: nn.Module) -> Iterator[tuple[str, RSAHeads]]:
    """The RSA heads that a forward pass uses, with their names in the model, in module order.

    Under PEFT these are the copies of the active adapter or, where it has none or is disabled, the heads as patched.
    """
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in seen:
            continue
        if isinstance(module, RSAHeads):
            yield name, module
        elif holds_copies(module):
            seen.update(module.modules())
            # The wrapper passes attributes on to the copy in force, so whose method this is tells which one it is.
            yield name, cast(Any, module).rates.__self__
