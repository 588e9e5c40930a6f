"""Where a run stands: its newest whole checkpoint, and whether the folder belongs to the same settings and data."""

import hashlib
import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME

from rsa_hf.training.arguments import RunArguments
from rsa_hf.utils.files import write_text
from rsa_hf.utils.text import finite_or_null

logger = logging.getLogger(__name__)

# How the names of those settings of TrainingArguments begin that do not change what is learned.
VARYING = (
    "output_dir", "overwrite_output_dir", "resume_from", "do_", "log", "report_to", "run_name", "project", "trackio",
    "disable_tqdm", "save_", "push_", "hub_", "eval_", "per_device_eval", "dataloader_num", "dataloader_p", "debug",
    "skip_memory", "ddp_", "prediction_loss", "include_", "batch_eval", "torch_empty", "local_rank", "enable_jit",
)  # fmt: skip


class RunFolder:
    """The output folder of a run: `run.json` has its settings and the digest of its data.

    Raises:
        ValueError: it is the folder of a run with other settings or data.
    """

    def __init__(self, run: RunArguments[Any], data: str) -> None:
        args = run.training
        self.folder, self._file = args.folder, args.folder / "run.json"
        training = {each.name: getattr(args, each.name) for each in fields(args) if not each.name.startswith(VARYING)}
        settings = {**asdict(run.model), "rsa": run.rsa.rsa, **asdict(run.data), **training}
        settings["processes"] = args.world_size
        # In the form in which they come back from the file.
        self.content = json.loads(json.dumps(finite_or_null({"data": data, "settings": settings}), default=str))
        known = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else None
        if known is not None and not {"data", "settings"} <= set(known):
            raise ValueError(f"{self._file} is not from a run of rsa-hf train. Give another output_dir.")
        is_asked_for = args.overwrite_output_dir or args.resume_from_checkpoint
        if known is None and not is_asked_for and newest_whole_checkpoint(self.folder):
            raise ValueError(
                f"{self.folder} has checkpoints, but no run.json: they are of another program. Give another "
                "output_dir, or overwrite_output_dir=true to delete them."
            )
        self._result: str | None = None  # the table of a run that has ended
        self._args = args
        if known is not None and not args.overwrite_output_dir:
            self._require_same(known)
            self._result = known.get("result")

    def _require_same(self, known: Mapping[str, Any]) -> None:
        before, now = known["settings"], self.content["settings"]
        shared = [key for key in before if key in now]
        changed = [f"{key}: {before[key]!r} → {now[key]!r}" for key in shared if before[key] != now[key]]
        if known["data"] != self.content["data"]:
            changed.append("the data: other examples than before")
        if changed:
            raise ValueError(
                f"{self.folder} is the folder of another run ({'; '.join(changed)}). Give another output_dir, or "
                "overwrite_output_dir=true to start over."
            )

    def had_finished(self) -> bool:
        """Whether this run has ended already; if so, print its table of results again."""
        if self._result is not None:
            asked = " It is not pushed again: hf upload does that." if self._args.push_to_hub else ""
            PartialState().print(f"{self.folder}: this run had finished.{asked}\n\n{self._result}")
        return self._result is not None

    def clear(self) -> None:
        """Delete what an earlier run has left, if `overwrite_output_dir` asks for it."""
        if self._args.overwrite_output_dir and self._args.should_save:
            for path in _checkpoints(self.folder):
                shutil.rmtree(path)
            for name in ("predictions.txt", "predictions.jsonl", "confusion_test.png", self._file.name):
                (self.folder / name).unlink(missing_ok=True)

    def write(self, **ended: str) -> None:
        """Write the settings and, once the run has ended, its `result`, a table.

        The first time is right before the first step, so that a run that fails earlier does not claim the folder.
        """
        write_text(self._file, json.dumps({**self.content, **ended}, indent=2) + "\n")


def digest(texts: Iterable[bytes]) -> str:
    """A digest of examples, in order."""
    total = hashlib.sha256()
    for text in texts:
        total.update(hashlib.sha256(text).digest())
    return total.hexdigest()


def newest_whole_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a Trainer that was written completely.

    The Trainer writes `checkpoint-N` in place, file by file. After a killed process or a full disk,
    `trainer.train(resume_from_checkpoint=True)` takes the incomplete checkpoint and fails. Instead:

        trainer.train(resume_from_checkpoint=newest_whole_checkpoint(args.output_dir))

    A checkpoint counts as complete if its `trainer_state.json`, which is written last, and all its tensor files are
    complete; so give each new run its own folder. A checkpoint of `save_only_model` does not count: the Trainer would
    begin a new schedule. With several processes, the files of the main one are checked. Resumed from the checkpoint of
    its last step, transformers' Trainer trains one more step: do not call it again for a run that has ended. Without a
    complete checkpoint this returns None, which starts from the beginning.
    """
    for folder in reversed(_checkpoints(Path(output_dir))):
        fault = _fault(folder)
        if fault is None:
            return str(folder)
        logger.warning("%s is incomplete and is not used: %s.", folder, fault)
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """The folders `checkpoint-N` of a Trainer, in order of N."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


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
        if not any(folder.glob("rng_state*")):
            return "it holds the model alone (save_only_model), no state of the optimiser"
    except (OSError, ValueError, SafetensorError) as error:
        return f"{path.name} cannot be read ({error})"
    return None
