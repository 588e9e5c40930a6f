"""The log of a run: `metrics.jsonl`, and the trackers of `training.report_to`, through Accelerate."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from rsa_hf.plots import plot_rem
from rsa_hf.report import RSAReport
from rsa_hf.training.checkpoints import flatten
from rsa_hf.utils.files import storage_errors, write_text
from rsa_hf.utils.text import finite_or_null

__all__ = ["MetricsLog", "RunLog", "require_installed"]

PROJECT = "rsa_hf"
IDENTITY = "trackers.json"  # the run's name for trackers, and those that have its settings
KEEP_SETTINGS = {"tensorboard", "wandb"}  # over a continued run; trackio shows those of its last process
# Trackers of Accelerate that take a batch of images, with their keywords for channels that come last.
IMAGE_KEYWORDS: dict[str, dict[str, str]] = {"tensorboard": {"dataformats": "NHWC"}, "wandb": {}, "swanlab": {}}


def require_installed(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed: Accelerate leaves out those that are not.

    Raises:
        ImportError: one of them is not installed.
    """
    known = {str(tracker) for tracker in get_available_trackers()}
    missing = " ".join(name for name in names if name not in known)
    if missing:
        raise ImportError(
            f"report_to={list(names)}: not installed: {missing}. pip install {missing}, or leave it out of report_to."
        )


class RunLog:
    """The log of a run: `metrics.jsonl`, and the trackers of its Accelerator.

    Trackers get the names that a Trainer with `RSACallback` gives them: `train/loss`, `eval/loss`, `train/rsa/gate`,
    and for each RSA layer `train/rsa/gate/layer_NN` and `train/rsa/decay/layer_NN`. All processes may call the
    methods; the main one writes.

    Args:
        output: output folder of the run.
        accelerator: as `make_accelerator` makes it.
        settings: the settings of the run, as nested mappings. Trackers show them as hyperparameters.
    """

    def __init__(self, output: Path, accelerator: Accelerator, settings: Mapping[str, Any]) -> None:
        self.metrics = MetricsLog(output / "metrics.jsonl")
        self.output = output
        self.accelerator = accelerator
        self.settings = settings

    def start(self, step: int) -> None:
        """Start the log; after step 0, continue it and drop what was logged later.

        TensorBoard, W&B and trackio continue their run; other trackers start another one. W&B and trackio cannot drop
        points; the continued run logs the same values again.
        """
        if not self.accelerator.is_main_process:
            return
        self.metrics.keep_until(step)
        if not self.accelerator.log_with:
            return
        path = self.output / IDENTITY
        known = json.loads(path.read_text(encoding="utf-8")) if step and path.exists() else {}
        run_id = known.get("id") or secrets.token_hex(6)
        name = self.output.resolve().name
        continued: dict[str, dict[str, Any]] = {
            "tensorboard": {"purge_step": step + 1},
            "wandb": {"name": name, "id": run_id, "resume": "allow"},
            "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},
        }
        self.accelerator.init_trackers(PROJECT, init_kwargs=continued)
        configured = set(known.get("configured", []))
        for tracker in self.accelerator.trackers:
            if tracker.name not in configured:
                tracker.store_init_configuration(_hyperparameters(self.settings))
            configured |= {tracker.name} & KEEP_SETTINGS
        write_text(path, json.dumps({"id": run_id, "configured": sorted(configured)}) + "\n")

    def write(
        self, step: int, train: Mapping[str, float | None], evaluation: Mapping[str, float] | None, report: RSAReport
    ) -> None:
        """Log a step.

        Args:
            step: optimiser steps done.
            train: loss, learning rate and other numbers; None: unknown.
            evaluation: results of the evaluation after this step, if there was one.
            report: gates and rates. `metrics.jsonl` gets those of each head. Trackers get `report.scalars()`; after an
                evaluation also the decay curves as an image, if they take one and matplotlib is installed.
        """
        if not self.accelerator.is_main_process:
            return
        record: dict[str, Any] = {"step": step, **train}
        scalars = {
            f"train/{name}": value for name, value in {**train, **report.scalars()}.items() if value is not None
        }
        if evaluation is not None:
            record["eval"] = evaluation
            scalars |= {f"eval/{name}": value for name, value in evaluation.items()}
        if report.layers:
            record["rsa"] = {
                layer.module: {
                    name: [getattr(head, name) for head in layer.heads] for name in ("gate", "decay", "theta")
                }
                for layer in report.layers
            }
        self.metrics.append(record)
        self.accelerator.log(scalars, step=step)
        if evaluation is not None and report.layers:
            self._log_decay_curves(step, report)

    def _log_decay_curves(self, step: int, report: RSAReport) -> None:
        trackers = [tracker for tracker in self.accelerator.trackers if tracker.name in IMAGE_KEYWORDS]
        if not trackers:
            return
        try:
            pixels = _decay_curves(report)
        except ImportError:  # `report_results` says so
            return
        for tracker in trackers:
            tracker.log_images({"rsa/decay_curves": pixels}, step=step, **IMAGE_KEYWORDS[tracker.name])

    def finish(self) -> None:
        """Finish the run in all trackers. Without this call it counts as crashed, where a tracker tells them apart."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.trackers.clear()


def _hyperparameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with dotted names, of the types that trackers take."""
    plain = bool | int | float | str | None
    return {name: value if isinstance(value, plain) else str(value) for name, value in flatten(settings).items()}


def _decay_curves(report: RSAReport) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The picture that `plot_rem` draws, as an array (1, height, width, 3)."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rsa.png"
        plot_rem(report, path)
        from matplotlib.image import imread

        image = imread(path)[None, :, :, :3]  # from 0 to 1; the fourth channel is opaque
    pixels: np.ndarray[Any, np.dtype[np.uint8]] = np.rint(255 * image).astype(np.uint8)
    return pixels


class MetricsLog:
    """The log of a run: a file of JSON lines with a `step` each, with null for NaN and infinity."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add a line, and wait until it is on the disk: a checkpoint may follow it."""
        line = json.dumps(finite_or_null(record), allow_nan=False)
        with storage_errors(self.path.parent), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def keep_until(self, step: int) -> None:
        """Delete lines after the step that a run continues from, and an incomplete last line."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # the run was killed while it wrote this line
            if record["step"] <= step:
                kept.append(line + "\n")
        write_text(self.path, "".join(kept))
