"""The state that a model carries from segment to segment (see `rsa_hf.models.segments`)."""

from typing import Any

from torch import nn


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
