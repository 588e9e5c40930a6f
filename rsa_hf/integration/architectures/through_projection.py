"""Bidirectional modules whose forward projects V with a child module: DeBERTa, DeBERTa-v2, MPNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rsa_hf.integration.architectures.stand_ins import Run, StandIn, StandInForCall, not_seen
from rsa_hf.ops.mask import remembered

__all__ = ["deberta_values", "from_projection_to_return", "heads_of_states", "run_mpnet"]


class _Kept:
    """A stand-in for a projection that keeps its output.

    Args:
        module: the parent.
        projection: name of the child.
    """

    def __init__(self, module: Any, projection: str) -> None:
        self._module, self._projection = module, projection
        self._project: Callable[[Tensor], Tensor] = getattr(module, projection)
        self._states: Tensor | None = None
        self.stand_in = StandInForCall(self._project, self._keep)

    def _keep(self, states: Tensor) -> Tensor:
        self._states = self._project(states)
        return self._states

    def states(self) -> Tensor:
        """The output of the projection. Raises NotImplementedError if it was not called."""
        if self._states is None:
            raise not_seen(self._module, self._projection)
        return self._states


def from_projection_to_return(projection: str, values: Callable[[Any, Tensor], Tensor]) -> Run:
    """For a forward that returns its output, [B, T, H * D], and the weights.

    Args:
        projection: name of the child that V comes from.
        values: takes the module and the output of the projection, and returns V, [B, H, S, D].
    """

    def run(module: Any, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
        kept = _Kept(module, projection)
        output, *rest = forward(StandIn(module, {projection: kept.stand_in}), **call)
        value = values(module, kept.states())
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
    that other queries see. Then this is a mask of padding alone, for which P V takes linear time.
    """
    visible = mask.bool()
    return visible | (visible.any(dim=-2, keepdim=True) & ~visible.any(dim=-1, keepdim=True))


def run_mpnet(module: Any, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """MPNet: the child `v` projects V, and the child `o` takes the output."""
    kept, project_output, mixed = _Kept(module, "v"), module.o, False

    def mix_and_project(output: Tensor) -> Any:
        nonlocal mixed
        mixed = True
        value = heads_of_states(module, kept.states())
        attention = output.unflatten(-1, (module.num_attention_heads, -1))
        return project_output(mix(attention, value, call.get("attention_mask"), causal=False).flatten(2))

    stand_ins = {"v": kept.stand_in, "o": StandInForCall(project_output, mix_and_project)}
    found = forward(StandIn(module, stand_ins), **call)
    if not mixed:
        raise not_seen(module, "o")
    return found
