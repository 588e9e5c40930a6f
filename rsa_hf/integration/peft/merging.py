"""PEFT's tuners on a model with RSA heads: no layer is put on them, and merging mixes or loses none of them silently.

PEFT's classes stay as they are, so that it alone merges adapters of other models.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from rsa_hf.integration.peft.adapter_plan import wrappers


def guard_tuner(tuner: Any) -> None:
    """Give a tuner its class with `_Tuner` in front, as `torch.distributed.fsdp.fully_shard` does with modules."""
    if not isinstance(tuner, _Tuner):
        tuner.__class__ = _with_rsa(tuner.__class__)


class _Tuner:
    """What PEFT's tuners do differently on a model with RSA heads."""

    model: nn.Module

    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:
        """Whether a module gets a layer: RSA heads and what is in them never, whatever pattern their name fits."""
        found = super()._check_target_module_exists(peft_config, key)  # type: ignore[misc]
        return found and "rsa" not in key.split(".")

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        """Merge the gates and rates of the adapters that are named; PEFT takes those of the active one."""
        named = [] if adapter_names is None else list(wrappers(self.model, adapter_names))
        for _, _, held in named:
            if len(held) > 1:
                raise ValueError(
                    f"adapter_names={adapter_names}: {', '.join(held)} each have gates and rates of their own: only "
                    "one can be merged. Name one of them."
                )
        for _, wrapper, held in named:
            wrapper.set_adapter(held)
        return _unwrapped(super().merge_and_unload(progressbar, safe_merge, adapter_names))  # type: ignore[misc]

    def unload(self) -> nn.Module:
        """Take the adapters off, after LN tuning too."""
        return _unwrapped(super().unload())  # type: ignore[misc]

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merge in place, but no adapter while the gates and rates of another one are active."""
        for _, wrapper, held in [] if adapter_names is None else wrappers(self.model, adapter_names):
            if wrapper.active_adapters != held:
                raise ValueError(
                    f"adapter_names={adapter_names}: the active gates and rates are those of "
                    f"{wrapper.active_adapters}, and merging in place keeps them. Call set_adapter first, then "
                    "merge_adapter()."
                )
        super().merge_adapter(adapter_names, safe_merge)  # type: ignore[misc]

    def add_weighted_adapter(self, adapters: list[str], *args: Any, **kwargs: Any) -> None:
        """Sum adapters without gates and rates; PEFT would silently lose those of a single one."""
        held = sorted({name for _, _, names in wrappers(self.model, adapters) for name in names})
        if held:
            raise ValueError(
                f"adapters={adapters}: {', '.join(held)} hold gates and rates, which have no weighted sum. Sum "
                "adapters without them; merge_and_unload() first puts an adapter that has them into the model."
            )
        super().add_weighted_adapter(adapters, *args, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        # The class has no name by which pickle could find it.
        return _new_tuner, (type(self).__bases__[1],), self.__dict__


@functools.cache
def _with_rsa(tuner: type) -> type:
    return type(tuner.__name__, (_Tuner, tuner), {"__module__": __name__})


def _new_tuner(tuner: type) -> Any:
    return object.__new__(_with_rsa(tuner))


def _unwrapped(model: nn.Module) -> nn.Module:
    """Replace the wrappers that LN tuning leaves behind by the RSA heads in them."""
    for name, wrapper, _ in list(wrappers(model)):
        heads = wrapper.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
        model.set_submodule(name, heads)
    return model
