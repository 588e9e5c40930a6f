"""For a plain `transformers.Trainer`: gates and rates in its logs, and its newest complete checkpoint."""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from rsa_hf.report import rsa_report

__all__ = ["RSACallback", "newest_whole_checkpoint"]

logger = logging.getLogger(__name__)


class RSACallback(TrainerCallback):
    """Logs gates and rates after each log of the training loss: `trainer.add_callback(RSACallback(trainer))`.

    They are logged with `trainer.log` as a separate record at the same step, so that every tracker and
    `state.log_history` get them: `rsa/gate`, the mean over all layers, and for each RSA layer in module order
    `rsa/gate/layer_NN` and `rsa/decay/layer_NN`, the means over its heads of g and of |λ| or γ.
    `rsa_hf.rsa_report` has the values of each head. `report_to` of `rsa-hf train` logs under the same names.

    Args:
        trainer: the Trainer that logs and whose model is reported on.
    """

    def __init__(self, trainer: Trainer) -> None:
        # Events do not pass the Trainer, and `logs` that a callback changes have reached the trackers before it.
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn where there is nothing to log."""
        if not rsa_report(kwargs["model"]).layers:
            logger.warning("RSACallback has nothing to log: the model has no RSA heads. Call patch_model first.")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log gates and rates after a record with the training loss."""
        if "loss" in (kwargs.get("logs") or {}):
            values = rsa_report(kwargs["model"]).scalars()
            if values:
                self.trainer.log(values)


def newest_whole_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a Trainer that was written completely.

    The Trainer writes `checkpoint-N` in place, file by file. After a killed process or a full disk,
    `trainer.train(resume_from_checkpoint=True)` takes the incomplete checkpoint and fails. Instead:

        trainer.train(resume_from_checkpoint=newest_whole_checkpoint(args.output_dir))

    A checkpoint counts as complete if its `trainer_state.json`, which is written last, and all its tensor files are.
    This requires that the Trainer does not overwrite older checkpoints: give each new run its own folder. With
    several processes the files of the main one are checked. Resumed from the checkpoint of its last step, the Trainer
    of transformers 5.23 trains one step more: do not call it again for a run that has ended.

    Args:
        output_dir: the `output_dir` of the `TrainingArguments`.

    Returns:
        A value for `resume_from_checkpoint`; None, which starts from the beginning, without a complete checkpoint.
    """
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
        fault = _fault(folder)
        if fault is None:
            return str(folder)
        logger.warning("%s is incomplete and is not used: %s.", folder, fault)
    return None


def _fault(folder: Path) -> str | None:
    """What is incomplete in a checkpoint, or None."""
    path = folder / TRAINER_STATE_NAME
    try:
        json.loads(path.read_text(encoding="utf-8"))
        for path in folder.rglob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass  # compares the length of the file with its header
        for path in (*folder.rglob("*.pt"), *folder.rglob("*.pth")):
            if not zipfile.is_zipfile(path):  # torch.save writes the table of contents at the end
                return f"{path.name} is truncated"
    except (OSError, ValueError, SafetensorError) as error:
        return f"{path.name} cannot be read ({error})"
    return None
