"""The state that a model carries from segment to segment (see `rsa_hf.models.segments`), across the steps of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor, nn


def segment_state_of(model: nn.Module) -> str:
    """The name of a model's state, its attribute `segment_state`; a ValueError if it has none."""
    name = getattr(model, "segment_state", None)
    if not isinstance(name, str):
        raise ValueError(
            f"a {type(model).__name__} carries nothing from segment to segment: it has no segment_state. Set "
            "carry_memory to false, or choose a model with memory, such as model_type transfo-xl."
        )
    return name


def carried_from(outputs: Any, name: str) -> Any:
    """The state in a model's outputs; a ValueError if there is none."""
    state = getattr(outputs, name, None)
    if state is None:
        raise ValueError(
            f"the model has returned no {name} to carry to the next segment. Set use_cache=True and a memory of more "
            "than 0 positions in its config, or carry_memory to false."
        )
    return state


class CarriedState:
    """The state of the parallel tracks of a run, for each micro-batch of a step.

    It is made from the model before Accelerate wraps it; a ValueError if the model carries no state.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name = segment_state_of(model)
        self._states: dict[int, Any] = {}

    def reset(self) -> None:
        """Forget the state of all tracks."""
        self._states = {}

    def mean_loss(self, model: nn.Module, batch: Mapping[str, Tensor], micro_batch: int) -> Tensor:
        """Mean next-token loss of a segment, `input_ids` and `shift_labels`, [B, T]; updates the state of its tracks.

        `micro_batch` is the index of the micro-batch in its step; it continues the one with this index a step before.
        """
        outputs = model(**batch, **{self.name: self._states.get(micro_batch)})
        self._states[micro_batch] = carried_from(outputs, self.name)
        loss: Tensor = outputs.loss
        return loss

    def save(self, folder: Path, process: int) -> None:
        """Write the state of this process's tracks into a checkpoint."""
        # Clones: torch.save writes the whole storage behind a view.
        torch.save(recursively_apply(torch.clone, self._states), folder / f"segment_state_{process}.pt")

    def load(self, folder: Path, process: int, device: torch.device) -> None:
        """Read the state from a checkpoint."""
        # To the CPU first: torch.load does not accept cpu:0, the device of processes under gloo.
        states = torch.load(folder / f"segment_state_{process}.pt", map_location="cpu", weights_only=True)
        self._states = send_to_device(states, device)
