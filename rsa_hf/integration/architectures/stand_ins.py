"""What stands in for a module, its child or its cache while the module's own forward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

__all__ = ["StandIn", "StandInForCache", "StandInForCall", "not_seen"]


class StandInForCache:
    """Stands in for the cache of a forward, or for none, and keeps the values that attention sees."""

    def __init__(self, cache: Any) -> None:
        # Of an encoder-decoder's two caches, self-attention has the one.
        self.cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        self.value: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Update the cache, if there is one: K and V of all positions, [B, Hv, S, D]."""
        if self.cache is not None:
            key, value = self.cache.update(key, value, *args, **keywords)
        self.value = value
        return key, value

    def get_seq_length(self, *args: Any) -> Any:
        """Number of cached positions."""
        return 0 if self.cache is None else self.cache.get_seq_length(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class StandIn:
    """Stands in for `self` in a module's own forward: the module itself but for a few attributes."""

    _module: nn.Module

    def __init__(self, module: nn.Module, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class StandInForCall:
    """Stands in for a child module: the child itself, but when it is called."""

    def __init__(self, child: nn.Module, call: Callable[[Tensor], Any]) -> None:
        self.child, self.call = child, call

    def __call__(self, states: Tensor) -> Any:
        """What is called in the child's place."""
        return self.call(states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.child, name)


def not_seen(module: nn.Module, what: str) -> NotImplementedError:
    """The error for a forward that went another way than through what stood in."""
    return NotImplementedError(
        f"{type(module).__name__} did not call {what} in its forward, so that RSA could not be mixed in. Use the "
        "model's default settings of attention (for Bloom: slow_but_exact=False)."
    )
