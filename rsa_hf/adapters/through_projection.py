"""A bidirectional forward that projects V with a child module: DeBERTa, DeBERTa-v2, MPNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rsa_hf.adapters.stand_ins import StandIn, StandInForCall, not_seen
from rsa_hf.adapters.wrapping import Run
from rsa_hf.geometry import remembered

__all__ = ["deberta_values", "from_projection_to_return", "heads_of_states", "run_mpnet"]


def from_projection_to_return(projection: str, values: Callable[[Any, Tensor], Tensor]) -> Run:
    """For a forward that returns its output, [B, T, H * D], and the weights.

    Args:
        projection: the attribute that V comes from.
        values: takes the module and what the projection gave, and returns V, [B, H, S, D].
    """

    def run(module: Any, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
        project, seen = getattr(module, projection), None

        def keep(states: Tensor) -> Any:
            nonlocal seen
            seen = project(states)
            return seen

        output, *rest = forward(StandIn(module, {projection: StandInForCall(project, keep)}), **call)
        if seen is None:
            raise not_seen(module, projection)
        attention = output.unflatten(-1, (module.num_attention_heads, -1))
        mask = remembered(_deberta_visible, call["attention_mask"])
        return (mix(attention, values(module, seen), mask, causal=False).flatten(2), *rest)

    return run


def deberta_values(module: Any, states: Tensor) -> Tensor:
    """V of DeBERTa: Q, K and V of a head stand side by side; only Q and V have a bias, added when they are apart."""
    value: Tensor = module.transpose_for_scores(states).chunk(3, dim=-1)[2]
    bias: Tensor = module.transpose_for_scores(module.v_bias[None, None, :])
    return value + bias


def heads_of_states(module: Any, states: Tensor) -> Tensor:
    """[B, S, H * D] as [B, H, S, D]."""
    value: Tensor = states.unflatten(-1, (module.num_attention_heads, -1))
    return value.transpose(1, 2)


def _deberta_visible(mask: Tensor) -> Tensor:
    """Turn a mask [B, 1, T, S], 0 where a key is hidden, into a boolean one.

    It hides all keys from padding's own queries too. What those give is never read, so they are shown the keys that
    others see: then padding alone is no mask of its own shape, and P V takes linear time.
    """
    visible = mask.bool()
    return visible | (visible.any(dim=-2, keepdim=True) & ~visible.any(dim=-1, keepdim=True))


def run_mpnet(module: Any, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """MPNet: its children `v` and `o` make V and take the output."""
    project_value, project_output = module.v, module.o
    seen, mixed = None, False

    def keep(states: Tensor) -> Any:
        nonlocal seen
        seen = project_value(states)
        return seen

    def mix_and_project(output: Tensor) -> Any:
        nonlocal mixed
        if seen is None:
            raise not_seen(module, "v")
        mixed = True
        attention = output.unflatten(-1, (module.num_attention_heads, -1))
        value = heads_of_states(module, seen)
        return project_output(mix(attention, value, call.get("attention_mask"), causal=False).flatten(2))

    stand_ins = {"v": StandInForCall(project_value, keep), "o": StandInForCall(project_output, mix_and_project)}
    found = forward(StandIn(module, stand_ins), **call)
    if not mixed:
        raise not_seen(module, "o")
    return found
