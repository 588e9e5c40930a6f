"""Bidirectional modules whose forward projects V with a child module: DeBERTa, DeBERTa-v2, MPNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rsa_hf.integration.architectures.stand_ins import Run, StandIn, StandInForCall, not_seen
from rsa_hf.integration.trial import is_marking, marks_of
from rsa_hf.ops.mask import remembered

__all__ = ["deberta_values", "from_projection_to_return", "heads_of_states", "run_mpnet"]


def _keeping(module: Any, projection: str) -> tuple[StandInForCall, list[Tensor]]:
    """A stand-in for the child `projection`, and the list that it appends its outputs to."""
    project, outputs = getattr(module, projection), []

    def keep(states: Tensor) -> Any:
        projected = project(states)
        outputs.append(marks_of(projected, dim=1) if is_marking() else projected)
        return outputs[-1]

    return StandInForCall(project, keep), outputs


def from_projection_to_return(projection: str, values: Callable[[Any, Tensor], Tensor]) -> Run:
    """For a forward that returns its output, [B, T, H * D], and the weights.

    Args:
        projection: name of the child that V comes from.
        values: takes the module and the output of the projection, and returns V, [B, H, S, D].
    """

    def run(module: Any, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
        stand_in, states = _keeping(module, projection)
        output, *rest = forward(StandIn(module, {projection: stand_in}), **call)
        if not states:
            raise not_seen(module, projection)
        value = values(module, states[0])
        attention = output.unflatten(-1, (module.num_attention_heads, -1))
        mask = remembered(_deberta_visible, call["attention_mask"])
        return (mix(attention, value, mask, causal=False).flatten(2), *rest)

    return run


def deberta_values(module: Any, states: Tensor) -> Tensor:
    """V of DeBERTa: Q, K and V of a head lie side by side; Q and V have a bias, added after they are split."""
    value: Tensor = module.transpose_for_scores(states).chunk(3, dim=-1)[2]
    bias: Tensor = module.transpose_for_scores(module.v_bias[None, None, :])
    return value + bias


def heads_of_states(module: Any, states: Tensor) -> Tensor:
    """[B, S, H * D] as [B, H, S, D]."""
    value: Tensor = states.unflatten(-1, (module.num_attention_heads, -1))
    return value.transpose(1, 2)


def _deberta_visible(mask: Tensor) -> Tensor:
    """Turn a mask [B, 1, T, S], 0 where a key is hidden, into a boolean one.

    The mask also hides all keys from padding's own queries. Their output is never read, so they are shown the keys
    that other queries see. Then this is a mask of padding only, for which P V takes linear time.
    """
    visible = mask.bool()
    return visible | (visible.any(dim=-2, keepdim=True) & ~visible.any(dim=-1, keepdim=True))


def run_mpnet(module: Any, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """MPNet: the child `v` projects V, and the child `o` takes the output."""
    (stand_in, states), project_output, mixed = _keeping(module, "v"), module.o, False

    def mix_and_project(output: Tensor) -> Any:
        nonlocal mixed
        mixed = True
        attention = output.unflatten(-1, (module.num_attention_heads, -1))
        value = heads_of_states(module, states[0])
        return project_output(mix(attention, value, call.get("attention_mask"), causal=False).flatten(2))

    found = forward(StandIn(module, {"v": stand_in, "o": StandInForCall(project_output, mix_and_project)}), **call)
    if not mixed:
        raise not_seen(module, "o")
    return found
