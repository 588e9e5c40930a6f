"""Checkpoints of the training loop: written atomically, the newest kept, resumed only under the same settings."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rsa_hf.training.carried import CarriedState
from rsa_hf.utils.files import discard, emptied, put_in_place, recover, storage_errors

__all__ = ["CheckpointFolder", "Progress", "flatten"]

logger = logging.getLogger(__name__)

KEPT = 2  # the newest, and one more in case it is damaged
_PROGRESS_FILE = "progress.json"
# Settings that may change when a run is continued: they do not affect what is learned.
_FREE_SETTINGS = {
    *("training.output_dir", "training.eval_batch_size", "training.resume", "training.report_to"),
    *("training.log_every_steps", "training.eval_every_steps", "training.save_every_steps"),
}


@dataclass
class Progress:
    """The progress of a run. A checkpoint has it beside the states that Accelerate saves.

    Attributes:
        step: optimiser steps done.
        tokens: input tokens seen, without padding.
        losses: the loss of each step since the last line in the log.
        metrics: results of the last evaluation.
        best_step: step of the best evaluation; None before the first.
        best_metrics: results of the best evaluation.
    """

    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)


class CheckpointFolder:
    """The checkpoints of a run, subfolders `step-N` of a folder.

    Every process has to call `recover`, `save`, `load` and `clear`.

    Args:
        path: the folder. It is created with the first checkpoint.
        settings: the settings of the run, as nested mappings. They are saved with each checkpoint.
        accelerator: its state is saved and loaded.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], accelerator: Accelerator) -> None:
        self.path = path
        self.accelerator = accelerator
        flat = {name: value for name, value in flatten(settings).items() if name not in _FREE_SETTINGS}
        # Through JSON, for a comparison with settings that were read from a checkpoint.
        self.settings: dict[str, Any] = json.loads(json.dumps(flat))

    def recover(self) -> None:
        """Delete incomplete checkpoints of a killed run."""
        if self.accelerator.is_main_process:
            with storage_errors(self.path):
                for left in self.path.glob(".step-*"):
                    recover(self.path / left.stem.removeprefix("."))
        self.accelerator.wait_for_everyone()

    def save(self, progress: Progress, carried: CarriedState | None) -> None:
        """Write `step-N`, and delete all but the newest checkpoints.

        Raises:
            StorageError: it cannot be written. Earlier checkpoints stay intact.
        """
        folder = self.path / f"step-{progress.step}"
        try:
            with storage_errors(self.path):
                self._write(folder, progress, carried)
        except Exception:
            shutil.rmtree(_temporary(folder), ignore_errors=True)  # it may fill the disk
            raise
        self.accelerator.wait_for_everyone()

    def _write(self, folder: Path, progress: Progress, carried: CarriedState | None) -> None:
        temporary = _temporary(folder)
        if self.accelerator.is_main_process:
            emptied(folder)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(temporary))
        if carried is not None:
            carried.save(temporary, self.accelerator.process_index)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            content = {"progress": asdict(progress), "settings": self.settings, "files": _sizes(temporary)}
            (temporary / _PROGRESS_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
            put_in_place(folder)
            self._drop_old()

    def _drop_old(self) -> None:
        """Delete all but the newest intact checkpoints."""
        for old in [folder for folder in self._saved() if _fault(folder) is None][:-KEPT]:
            discard(old)

    def newest(self) -> Path | None:
        """The newest intact checkpoint, or None if none was saved.

        Raises:
            ValueError: all checkpoints are damaged.
        """
        faults: list[str] = []
        for folder in reversed(self._saved()):
            fault = _fault(folder)
            if fault is None:
                if faults:
                    logger.warning("%s; continuing from %s, the newest intact one.", "; ".join(faults), folder)
                return folder
            faults.append(f"the checkpoint {folder} is damaged: {fault}")
        if faults:
            raise ValueError(f"{'; '.join(faults)}. To start over, set training.resume to 'never'.")
        return None

    def load(self, folder: Path, carried: CarriedState | None) -> Progress:
        """Restore the state of a checkpoint, random number generators included.

        Raises:
            ValueError: the checkpoint is missing or damaged, or belongs to a run with other settings.
        """
        fault = _fault(folder)
        if fault is not None:
            raise ValueError(
                f"{folder} is not an intact checkpoint ({fault}). Set training.resume to a step-N folder of this run, "
                "to 'auto' for the newest, or to 'never' to start over."
            )
        content = json.loads((folder / _PROGRESS_FILE).read_text(encoding="utf-8"))
        then, now = content["settings"], self.settings
        changed = [
            f"{name} was {then.get(name)!r}, now {now.get(name)!r}"
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        ]
        if changed:
            raise ValueError(
                f"the checkpoint {folder} belongs to a run with other settings ({'; '.join(changed)}). Restore them "
                "to continue that run, start a new run with another training.output_dir, or set training.resume to "
                "'never' to delete that run's checkpoints and start over."
            )
        if carried is not None:
            carried.load(folder, self.accelerator.process_index, self.accelerator.device)
        self.accelerator.load_state(str(folder))
        return Progress(**content["progress"])

    def clear(self, after: int = -1) -> None:
        """Delete checkpoints newer than a step, and surplus old ones that a killed run did not delete."""
        if self.accelerator.is_main_process:
            with storage_errors(self.path):
                for folder in reversed(self._saved()):
                    if _step(folder) > after:
                        discard(folder)
                self._drop_old()
        self.accelerator.wait_for_everyone()

    def _saved(self) -> list[Path]:
        """The checkpoints, oldest first. A folder gets this name after all its files are written."""
        folders = [folder for folder in self.path.glob("step-*") if re.fullmatch(r"step-\d+", folder.name)]
        return sorted((folder for folder in folders if (folder / _PROGRESS_FILE).is_file()), key=_step)


def _temporary(folder: Path) -> Path:
    """The folder that `emptied` creates: only the main process calls it."""
    return folder.with_name(f".{folder.name}.tmp")


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != _PROGRESS_FILE)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _fault(folder: Path) -> str | None:
    """A missing or truncated file of a checkpoint, as after an interrupted copy; None if it is intact."""
    try:
        written = json.loads((folder / _PROGRESS_FILE).read_text(encoding="utf-8"))["files"]
        found = _sizes(folder)
        for name, size in written.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != size:
                return f"{name} has {found[name]} bytes, of {size}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_PROGRESS_FILE} cannot be read ({error!r})"
    return None


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
