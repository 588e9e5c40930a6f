"""Modules whose forward passes V and the output of attention through a cache or a child module, or returns them.

These can be seen only there, so the forward gets stand-ins for its cache and its children. A stand-in exists for one
call only: hooks on the modules themselves would be shared between threads, and copied and pickled with them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from rsa_hf.integration.trial import marked, state
from rsa_hf.ops.mask import remembered

Run = Callable[[Any, Callable[..., Any], dict[str, Any], Callable[..., Tensor]], Any]


def own_forward(
    heads: str,
    *,
    cache: str | None = None,
    source: str | None = None,
    values: Callable[[Any, Tensor], Tensor] | None = None,
    projection: str | None = None,
    causal: bool | str = True,
    others: str | None = None,
    read_mask: Callable[[Tensor], Tensor] | None = None,
    positions: bool = False,
) -> Run:
    """For a forward that calls `cache.update(key, value, layer)` or `source(states)`, then `projection(output)`.

    Args:
        heads: name of the attribute that holds H.
        cache: name of the forward's parameter for the cache, through which K and V pass.
        source: name of the child that V comes from, if there is no cache.
        values: takes the module and `source`'s output, returns V, [B, H, S, D]; None: `source` gives [B, S, H * D].
        projection: name of the child that takes the output, [B, T, H * D]; None: the forward returns it, then more.
        causal: whether the module is causal, or the name of the attribute that says so.
        others: name of the parameter for states of another sequence (cross-attention), if there is one.
        read_mask: turns the forward's mask into one that `read_attention_mask` takes, if it is of another form.
        positions: whether `position_ids` mark packed documents for flash attention.
    """

    def run(module: Any, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
        if others is not None and call.get(others) is not None:
            return forward(module, **call)
        count, mask = getattr(module, heads), call.get("attention_mask")
        seen: list[Tensor] = []
        children: dict[str, Any] = {}
        direction = getattr(module, causal) if isinstance(causal, str) else causal
        if read_mask is not None and mask is not None:
            mask = remembered(read_mask, mask)
        if cache is not None:
            call = {**call, cache: _StandInForCache(call.get(cache), seen)}
        if source is not None:
            children[source] = _StandIn(getattr(module, source), call=lambda child, x: _kept(seen, child(x)))
        was_mixed = False

        def mixed(output: Tensor) -> Tensor:
            nonlocal was_mixed
            if not seen:
                raise _not_seen(module, source or f"{cache}.update")
            value, attention = seen[0], output.unflatten(-1, (count, -1))
            if source is not None:
                value = values(module, value) if values else value.unflatten(-1, (count, -1)).transpose(1, 2)
            was_mixed = True
            return mix(attention, value, mask, bool(direction), flash=call if positions else None).flatten(2)

        if projection is not None:
            children[projection] = _StandIn(getattr(module, projection), call=lambda child, x: child(mixed(x)))
        found = forward(_StandIn(module, **children) if children else module, **call)
        if projection is None:
            output, *more = found
            return (mixed(output), *more)
        if not was_mixed:
            raise _not_seen(module, projection)
        return found

    return run


def _kept(seen: list[Tensor], states: Tensor) -> Tensor:
    seen.append(marked(states, dim=1))
    return seen[-1]


def _not_seen(module: nn.Module, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(module).__name__} did not call {what} in its forward, so that RSA could not be mixed in. Use the "
        "model's default settings of attention (for Bloom: slow_but_exact=False)."
    )


class _StandInForCache:
    """Wraps a cache, or None, and keeps the values that attention sees."""

    def __init__(self, cache: Any, seen: list[Tensor]) -> None:
        if state.marking:
            cache = None  # marks must not stay in it
        # An encoder-decoder has two caches, one of them for self-attention.
        self.cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        self.seen = seen

    def update(self, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        if self.cache is not None:
            key, value = self.cache.update(key, value, *args, **keywords)
        self.seen.append(marked(value))
        return key, self.seen[-1]

    def get_seq_length(self, *args: Any) -> Any:
        return 0 if self.cache is None else self.cache.get_seq_length(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class _StandIn:
    """A module with a few attributes replaced, or with its call replaced by a function that gets the module."""

    _module: nn.Module
    _call: Callable[[nn.Module, Tensor], Any]

    def __init__(self, module: nn.Module, call: Any = None, **replaced: Any) -> None:
        self.__dict__.update(replaced, _module=module, _call=call)

    def __call__(self, states: Tensor) -> Any:
        return self._call(self._module, states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def deberta_values(module: Any, states: Tensor) -> Tensor:
    """V of DeBERTa: Q, K and V of a head lie side by side; Q and V have a bias, added after they are split."""
    value: Tensor = module.transpose_for_scores(states).chunk(3, dim=-1)[2]
    bias: Tensor = module.transpose_for_scores(module.v_bias[None, None, :])
    return value + bias


def deberta_visible(mask: Tensor) -> Tensor:
    """Turn DeBERTa's mask [B, 1, T, S], 0 where a key is hidden, into a boolean one.

    The mask also hides all keys from padding's own queries. Their output is never read, so they are shown the keys
    that other queries see. Then this is a mask of padding only, for which P V takes linear time.
    """
    visible = mask.bool()
    return visible | (visible.any(dim=-2, keepdim=True) & ~visible.any(dim=-1, keepdim=True))
