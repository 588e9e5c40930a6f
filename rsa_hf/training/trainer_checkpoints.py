"""`newest_whole_checkpoint`: where a `transformers.Trainer` whose run was killed goes on."""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME

__all__ = ["newest_whole_checkpoint"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-\d+")


def newest_whole_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a Trainer that was written to its end.

    The Trainer writes `checkpoint-N` in its place, file by file. After a process that was killed meanwhile, or a full
    disk, `trainer.train(resume_from_checkpoint=True)` takes the torn one and fails. This takes the newest whole one:

        trainer.train(resume_from_checkpoint=newest_whole_checkpoint(args.output_dir))

    A checkpoint is whole if its `trainer_state.json`, which is written last, is, and so is every file of tensors in
    it. That holds as long as the Trainer does not write over older checkpoints: give a run that is started anew a
    folder of its own, and call `train` in `rsa_hf.utils.files.sole_writer(Path(args.output_dir))` where another
    process could meet it there. Of several processes that train together the main one's files are looked at.

    Args:
        output_dir: that of the `TrainingArguments`.

    Returns:
        What `Trainer.train` takes as `resume_from_checkpoint`; None, with which it starts from the beginning, where
        there is no whole checkpoint.
    """
    folders = [folder for folder in Path(output_dir).glob("checkpoint-*") if _NAME.fullmatch(folder.name)]
    for folder in sorted(folders, key=_step, reverse=True):
        fault = _fault(folder)
        if fault is None:
            return str(folder)
        logger.warning("%s is passed over, it was not written to its end: %s.", folder, fault)
    return None


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def _fault(folder: Path) -> str | None:
    """What is torn in a checkpoint; None where it is whole."""
    path = folder / TRAINER_STATE_NAME
    try:
        json.loads(path.read_text(encoding="utf-8"))
        for path in folder.rglob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass  # it compares the length of the file with its head
        for path in (*folder.rglob("*.pt"), *folder.rglob("*.pth")):
            if not zipfile.is_zipfile(path):  # what torch.save writes has its table of contents at the end
                return f"{path.name} is torn"
    except (OSError, ValueError, SafetensorError) as error:
        return f"{path.name} cannot be read ({error})"
    return None
