"""Patch the model of a run, with heads chosen on its training data if that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from rsa_hf.calibration import run_calibration
from rsa_hf.config import RSAConfig
from rsa_hf.patching import patch_model
from rsa_hf.training.arguments import RunArguments
from rsa_hf.training.carried import ParallelTracks
from rsa_hf.utils.files import write_text

__all__ = ["calibration_batches", "patch_for_run"]


def patch_for_run(
    model: PreTrainedModel, train_dataset: Any, collate_fn: Callable[[list[Any]], Any], run: RunArguments[Any]
) -> dict[str, float]:
    """Patch the plain model of a run as its settings say, after a calibration if they ask for one.

    What a calibration finds is printed and written to `calibration.json` and, with matplotlib, `calibration.png` in
    the output folder. A run that continues, and the other processes, read it there. The model stays plain if no gain
    was shown.

    Args:
        model: the model, as it is before training.
        train_dataset: the training data of the run.
        collate_fn: makes a batch of a list of examples.
        run: the settings. Their seed chooses the rows.

    Returns:
        The scores of the calibration, losses before training without and with RSA heads; without one, none.

    Raises:
        ValueError: the data has memory to carry from row to row, or cannot be used for a calibration.
    """
    settings, args = run.rsa.calibrate, run.training
    if settings is None:
        if run.rsa.config is not None:
            patch_model(model, run.rsa.config)
        return {}
    path = args.folder / "calibration.json"
    with args.main_process_first():
        is_new = not path.exists() or not (path.parent / "run.json").exists()
        if is_new and args.should_save:
            batches = calibration_batches(
                train_dataset, collate_fn, settings.max_rows, args.per_device_train_batch_size, args.seed
            )
            model.to(args.device)  # type: ignore[arg-type]  # transformers' decorator
            found = run_calibration(model, batches, seed=args.seed, **asdict(settings))
            print(found)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"scores": found.scores, **found.to_dict()}, indent=2) + "\n")
            try:
                found.plot(path.with_suffix(".png"))
            except ImportError as error:
                print(f"no heatmap: {error}")
        known = json.loads(path.read_text(encoding="utf-8"))
    patch_model(model, RSAConfig.from_dict(known["config"]))
    return dict(known["scores"])


def calibration_batches(
    train_dataset: Any, collate_fn: Callable[[list[Any]], Any], count: int, batch_size: int, seed: int
) -> list[dict[str, Any]]:
    """Some rows of a data set, drawn at random, or the first ones of a stream, in batches.

    Raises:
        ValueError: the data has memory to carry from row to row.
    """
    if isinstance(train_dataset, ParallelTracks):
        raise ValueError("rsa: calibrate reads single rows, so carry_memory=true cannot be used with it.")
    if isinstance(train_dataset, IterableDataset):
        rows = list(islice(train_dataset, count))
    else:
        order = torch.randperm(len(train_dataset), generator=torch.Generator().manual_seed(seed), device="cpu")
        rows = [train_dataset[i] for i in order[:count].tolist()]
    return [{**collate_fn(rows[i : i + batch_size])} for i in range(0, len(rows), batch_size)]
