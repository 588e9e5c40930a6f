"""Stand-ins for a module, its child or its cache while the module's own forward runs.

The forwards of these models call a cache and a projection, and V and the output of attention can be seen only there. A
stand-in exists for one call only. Hooks on the modules themselves would be shared between threads, and copied and
pickled with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from rsa_hf.integration.trial import is_marking, marks_of

__all__ = ["Run", "StandIn", "StandInForCache", "StandInForCall", "not_seen"]

Run = Callable[[Any, Callable[..., Any], dict[str, Any], Callable[..., Tensor]], Any]


class StandInForCache:
    """A cache, or none, that keeps the values that attention sees."""

    def __init__(self, cache: Any) -> None:
        if is_marking():
            cache = None  # marks must not stay in it
        # An encoder-decoder has two caches, one of them for self-attention.
        self.cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        self.value: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Update the cache, if there is one: K and V of all positions, [B, Hv, S, D]."""
        if self.cache is not None:
            key, value = self.cache.update(key, value, *args, **keywords)
        self.value = value = marks_of(value) if is_marking() else value
        return key, value

    def get_seq_length(self, *args: Any) -> Any:
        """Number of cached positions."""
        return 0 if self.cache is None else self.cache.get_seq_length(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class StandIn:
    """`self` for a module's forward: the module with a few attributes replaced."""

    _module: nn.Module

    def __init__(self, module: nn.Module, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class StandInForCall:
    """A child module with another call."""

    def __init__(self, child: nn.Module, call: Callable[[Tensor], Any]) -> None:
        self.child, self.call = child, call

    def __call__(self, states: Tensor) -> Any:
        """Call the replacement."""
        return self.call(states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.child, name)


def not_seen(module: nn.Module, what: str) -> NotImplementedError:
    """The error for a forward that did not call a stand-in."""
    return NotImplementedError(
        f"{type(module).__name__} did not call {what} in its forward, so that RSA could not be mixed in. Use the "
        "model's default settings of attention (for Bloom: slow_but_exact=False)."
    )
