"""Checkpoints of a run: written whole or not at all, the newest kept, and continued only by the same run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rsa_hf.training.carried import CarriedState

__all__ = ["CheckpointFolder", "Progress", "written_whole"]

KEPT = 2  # the newest, and one more in case that one proves unreadable
_PROGRESS_FILE = "progress.json"
# Settings that may change when a run is continued: they decide what is shown and kept, not what is learned.
_FREE_SETTINGS = {
    f"training.{name}"
    for name in (
        "output_dir",
        "eval_batch_size",
        "log_every_steps",
        "eval_every_steps",
        "save_every_steps",
        "resume",
    )
}


@dataclass
class Progress:
    """How far a run has come: all that a checkpoint holds beside the states of model, optimiser and the rest.

    Attributes:
        step: optimiser steps done.
        tokens: input tokens seen, padding not counted.
        losses: the loss of every step since the last line in the log.
        metrics: the last evaluation.
        best_step: the step of the best evaluation; None before the first.
        best_metrics: that evaluation.
    """

    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, which takes the place of `folder` when the block ends without an error.

    Only one process may enter.
    """
    temporary = _emptied(folder.with_name(f".{folder.name}.tmp"))
    yield temporary
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


class CheckpointFolder:
    """The checkpoints of one run, `step-N` below a folder.

    Args:
        path: the folder; made when the first checkpoint is saved.
        settings: what decides the run, as nested mappings; a checkpoint remembers it.
        accelerator: whose state is saved and loaded; every process has to call `save`, `load` and `clear`.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], accelerator: Accelerator) -> None:
        self.path = path
        self.accelerator = accelerator
        flat = {name: value for name, value in _flatten(settings).items() if name not in _FREE_SETTINGS}
        # Through JSON, so that what is compared later has the types that it is read back with.
        self.settings: dict[str, Any] = json.loads(json.dumps(flat))

    def save(self, progress: Progress, carried: CarriedState | None = None) -> None:
        """Write `step-N`, and delete all but the newest checkpoints.

        Args:
            progress: how far the run has come.
            carried: what the model carries to the next step, of this process.
        """
        folder = self.path / f"step-{progress.step}"
        temporary = self.path / f".{folder.name}.tmp"
        if self.accelerator.is_main_process:
            _emptied(temporary)  # of what a killed run may have left
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(temporary))
        if carried is not None:
            carried.save(temporary, self.accelerator.process_index)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            content = {"progress": asdict(progress), "settings": self.settings}
            (temporary / _PROGRESS_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
            for old in self._whole()[:-KEPT]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def newest(self) -> Path | None:
        """The newest checkpoint; None where there is none."""
        whole = self._whole()
        return whole[-1] if whole else None

    def load(self, folder: Path, carried: CarriedState | None = None) -> Progress:
        """Set everything as it was when a checkpoint was saved, random generators included.

        Args:
            folder: the checkpoint.
            carried: set to what the model carried.

        Raises:
            ValueError: the folder is no whole checkpoint, or one of a run with other settings.
        """
        try:
            content = json.loads((folder / _PROGRESS_FILE).read_text(encoding="utf-8"))
            progress, settings = Progress(**content["progress"]), content["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder} is no whole checkpoint ({error}). Give a step-N folder of this run as training.resume, "
                "or 'auto' for the newest, or 'never' to start over."
            ) from error
        changed = [
            f"{name} was {_show(settings, name)}, now {_show(self.settings, name)}"
            for name in sorted(settings.keys() | self.settings.keys())
            if settings.get(name) != self.settings.get(name)
        ]
        if changed:
            raise ValueError(
                f"the checkpoint {folder} is of a run with other settings ({'; '.join(changed)}). Put them back to "
                "go on with that run, or start a new one with another training.output_dir, or start over with "
                "training.resume 'never', which deletes that run's checkpoints."
            )
        if carried is not None:
            carried.load(folder, self.accelerator.process_index, self.accelerator.device)
        self.accelerator.load_state(str(folder))
        return progress

    def clear(self) -> None:
        """Delete every checkpoint, and nothing else that may lie beside them."""
        if self.accelerator.is_main_process:
            for folder in self._whole():
                shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()

    def _whole(self) -> list[Path]:
        """The checkpoints, oldest first. A folder gets its name only after everything in it is written."""
        found = []
        for folder in self.path.glob("step-*"):
            match = re.fullmatch(r"step-(\d+)", folder.name)
            if match and (folder / _PROGRESS_FILE).is_file():
                found.append((int(match[1]), folder))
        return [folder for _, folder in sorted(found)]


def _emptied(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _show(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"
