"""Modules whose forward passes K and V through the cache, which returns what attention sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rsa_hf.integration.architectures.stand_ins import Run, StandIn, StandInForCache, StandInForCall, not_seen
from rsa_hf.ops.mask import remembered

__all__ = ["through_cache_and_projection", "through_cache_and_return"]


def through_cache_and_projection(
    cache: str,
    heads: str,
    projection: str,
    *,
    hides: bool = False,
    positions: bool = False,
    decoder: str | None = None,
    others: str | None = None,
) -> Run:
    """For a forward that calls `key, value = cache.update(key, value, layer)` and `projection(output)`.

    Args:
        cache: name of the forward's parameter.
        heads: name of the attribute that holds H.
        projection: name of the projection, which is called with [B, T, H * D].
        hides: whether True in a mask means hidden.
        positions: whether `position_ids` mark packed documents for flash attention.
        decoder: name of the attribute that says whether the module is causal; None: it always is.
        others: name of the parameter for states of another sequence (cross-attention); None: there is none.
    """

    def run(module: nn.Module, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
        if others is not None and call.get(others) is not None:
            return forward(module, **call)
        seen = StandInForCache(call.get(cache))
        mask = call.get("attention_mask")
        causal = decoder is None or bool(getattr(module, decoder))
        if hides and mask is not None:
            mask = remembered(torch.logical_not, mask)
        project = getattr(module, projection)
        mixed = False

        def mix_and_project(output: Tensor) -> Any:
            nonlocal mixed
            if seen.value is None:
                raise not_seen(module, f"{cache}.update")
            attention = output.unflatten(-1, (getattr(module, heads), -1))
            mixed = True
            return project(mix(attention, seen.value, mask, causal, flash=call if positions else None).flatten(2))

        stand_in = StandIn(module, {projection: StandInForCall(project, mix_and_project)})
        found = forward(stand_in, **{**call, cache: seen})
        if not mixed:
            raise not_seen(module, projection)
        return found

    return run


def through_cache_and_return(cache: str, heads: str, *, decoder: str, others: str) -> Run:
    """For a forward that calls `key, value = cache.update(key, value, layer)` and returns [B, T, H * D] and weights.

    Args:
        cache: name of the forward's parameter.
        heads: name of the attribute that holds H.
        decoder: name of the attribute that says whether the module is causal.
        others: name of the parameter for states of another sequence (cross-attention).
    """

    def run(module: nn.Module, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
        if call.get(others) is not None:
            return forward(module, **call)
        seen = StandInForCache(call.get(cache))
        output, *rest = forward(module, **{**call, cache: seen})
        if seen.value is None:
            raise not_seen(module, f"{cache}.update")
        attention = output.unflatten(-1, (getattr(module, heads), -1))
        causal = bool(getattr(module, decoder))
        return (mix(attention, seen.value, call.get("attention_mask"), causal=causal).flatten(2), *rest)

    return run
