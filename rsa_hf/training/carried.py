"""What a model carries from one segment of a text to the next, from step to step of a run.

A model that carries something names it: its class attribute `segment_state` is the argument of `forward` that takes
what was carried, and the field of its output that returns it for the segment that follows: "mems" of Transformer-XL,
"state" of recurrent networks. It is made of tensors in tuples, lists or dicts, without gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["CarriedState", "Tracks", "carried_from", "segment_state_of"]


@runtime_checkable
class Tracks(Protocol):
    """A data set of segments: each row of a batch continues the same row, `num_tracks` examples before."""

    num_tracks: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def segment_state_of(model: nn.Module) -> str:
    """The name of what a model carries from segment to segment.

    Raises:
        ValueError: it carries nothing.
    """
    name = getattr(model, "segment_state", None)
    if not isinstance(name, str):
        raise ValueError(
            f"a {type(model).__name__} carries nothing from segment to segment: it has no segment_state. Set "
            "data.carry_memory to false, which trains and scores blocks one by one, or take a model that does "
            "(model.model_type 'transfo-xl' or 'recurrent')."
        )
    return name


def carried_from(outputs: Any, name: str) -> Any:
    """What a segment's outputs hand on to the next one.

    Args:
        outputs: of the model.
        name: as `segment_state_of` gives it.

    Raises:
        ValueError: nothing.
    """
    state = getattr(outputs, name, None)
    if state is None:
        raise ValueError(
            f"the model has returned no {name} to carry to the next segment. Set use_cache=True and a memory of more "
            "than 0 positions in its config, or data.carry_memory to false."
        )
    return state


class CarriedState:
    """What the tracks of a run carry, for each micro-batch of a step.

    Args:
        model: the model before Accelerate wraps it.

    Raises:
        ValueError: it carries nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name = segment_state_of(model)
        self._computes_loss = getattr(model, "takes_shift_labels", False)
        self._states: dict[int, Any] = {}

    def reset(self) -> None:
        """Forget everything: each track begins again."""
        self._states = {}

    def mean_loss(self, model: nn.Module, batch: Mapping[str, Tensor], micro_batch: int) -> Tensor:
        """The mean loss over the tokens that follow each of a segment's, which moves its tracks on.

        Args:
            model: what is called, wrapped or not.
            batch: `input_ids` and `shift_labels`, [B, T].
            micro_batch: which of the step's, counted from 0; it continues the one of this number before.
        """
        inputs: dict[str, Any] = {**batch, self.name: self._states.get(micro_batch)}
        if not self._computes_loss:
            targets = inputs.pop("shift_labels")
        outputs = model(**inputs)
        self._states[micro_batch] = carried_from(outputs, self.name)
        if self._computes_loss:  # an adaptive softmax never makes all logits for it
            loss: Tensor = outputs.loss
            return loss
        return cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())

    def save(self, folder: Path, process: int) -> None:
        """Write what this process's tracks carry into a checkpoint."""
        # Clones: of a view of a longer memory all of it would be written.
        torch.save(recursively_apply(torch.clone, self._states), folder / _file(process))

    def load(self, folder: Path, process: int, device: torch.device) -> None:
        """Read what `save` has written.

        Raises:
            OSError: there is no such file.
        """
        # To the CPU first: torch.load does not know the device cpu:0 of processes that gloo joins.
        states = torch.load(folder / _file(process), map_location="cpu", weights_only=True)
        self._states = send_to_device(states, device)


def _file(process: int) -> str:
    return f"segment_state_{process}.pt"
