"""Choose the RSA heads of a run on its training data, before it is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from rsa_hf.calibration import run_calibration
from rsa_hf.config import RSAConfig
from rsa_hf.patching import patch_model
from rsa_hf.training.arguments import RunConfig
from rsa_hf.training.carried import ParallelTracks
from rsa_hf.training.steps import Batch
from rsa_hf.utils.files import sole_writer, storage_errors, write_text

__all__ = ["FILE", "calibration_batches", "patch_calibrated"]

FILE = "calibration.json"
HEATMAP = "calibration.png"


def patch_calibrated(
    model: PreTrainedModel,
    train_dataset: Any,
    collate_fn: Callable[[list[Any]], Batch],
    config: RunConfig[Any],
    accelerator: Accelerator,
) -> PreTrainedModel:
    """Patch the model of a run whose section `rsa` has `calibrate`.

    What was found is printed and written to `calibration.json` and, with matplotlib, `calibration.png` in the output
    folder. A run that continues reads it there. The model stays plain if no gain was shown.

    Args:
        model: the plain model, as it is before training.
        train_dataset: the training data of the run.
        collate_fn: makes a batch of a list of examples.
        config: the settings of the run. Its seed chooses the rows.
        accelerator: of the run; the main process calibrates, the others read what it has found.

    Raises:
        ValueError: the data has memory to carry from row to row, or cannot be used for a calibration.
    """
    settings, training = config.calibrate, config.training
    assert settings is not None
    output = Path(training.output_dir)
    made_for = json.loads(json.dumps({**config.to_dict(), "training": {"seed": training.seed}}))
    with accelerator.main_process_first():
        known = json.loads((output / FILE).read_text(encoding="utf-8")) if (output / FILE).exists() else {}
        is_stale = known.get("made for") != made_for or training.resume == "never"
        if is_stale and accelerator.is_main_process:
            batches = calibration_batches(
                train_dataset, collate_fn, settings.max_rows, training.batch_size, training.seed
            )
            found = run_calibration(model.to(accelerator.device), batches, seed=training.seed, **asdict(settings))
            print(found)
            known = {"made for": made_for, "scores": found.scores, **found.to_dict()}
            with sole_writer(output), storage_errors(output):
                write_text(output / FILE, json.dumps(known, indent=2) + "\n")
                try:
                    found.plot(output / HEATMAP)
                except ImportError as error:
                    print(f"no heatmap: {error}")
    return patch_model(model, RSAConfig.from_dict(known["config"]))


def calibration_batches(
    train_dataset: Any,
    collate_fn: Callable[[list[Any]], Batch],
    count: int,
    batch_size: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Some rows of a data set, drawn at random, or the first ones of a stream, in batches.

    Raises:
        ValueError: the data has memory to carry from row to row.
    """
    if isinstance(train_dataset, ParallelTracks):
        raise ValueError("rsa.calibrate reads single rows, so data.carry_memory=true cannot be used with it.")
    if isinstance(train_dataset, IterableDataset):
        rows = list(islice(train_dataset, count))
    else:
        order = torch.randperm(len(train_dataset), generator=torch.Generator().manual_seed(seed), device="cpu")
        rows = [train_dataset[i] for i in order[:count].tolist()]
    return [{**collate_fn(rows[i : i + batch_size])} for i in range(0, len(rows), batch_size)]
