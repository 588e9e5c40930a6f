"""The Trainer: no resuming from a checkpoint with another plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.utils import CONFIG_NAME

from rsa_hf.saved_plan import SavedPlan, differences, read_plan, saved_plans

__all__ = ["wrap_load_from_checkpoint"]


def wrap_load_from_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a checkpoint with another plan."""

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, *args: Any, **keywords: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PreTrainedModel):  # the plan of an adapter is checked where it is loaded
            _require_same_plan(Path(resume_from_checkpoint), model)
        return original(self, resume_from_checkpoint, *args, **keywords)

    return _load_from_checkpoint


def _require_same_plan(folder: Path, model: PreTrainedModel) -> None:
    """Check that a checkpoint has the model's plan: the Trainer reads its tensors, and never its config.

    Raises:
        ValueError: it has another plan, or none, or the model has none.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    theirs = [read_plan(part["rsa"]) for part in parts if part.get("rsa") is not None]
    own = [read_plan(content) for content in saved_plans(model.config)]
    if len(own) == len(theirs) and all(any(_same(plan, other) for other in theirs) for plan in own):
        return
    if not own or not theirs:
        which, without = ("checkpoint", "model") if theirs else ("model", "checkpoint")
        what = f"the {which} has RSA heads, and the {without} has none"
    else:
        what = f"its RSA heads have another plan than the model's ({differences(theirs[0], own[0])})"
    raise ValueError(
        f"{folder} cannot be resumed from: {what}. Give the Trainer the model that the run was started with, "
        "or leave resume_from_checkpoint out."
    )


def _same(plan: SavedPlan, other: SavedPlan) -> bool:
    """Whether two plans are the same, apart from where parameters start: the checkpoint has trained values."""
    return plan.modules == other.modules and plan.layers == other.layers
