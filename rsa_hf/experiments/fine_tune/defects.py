"""Defect detection on Devign."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from rsa_hf.experiments.fine_tune.learning import Task
from rsa_hf.experiments.runner.data import data_file
from rsa_hf.tasks.defect_data import DefectDataConfig, Example, load_defect_data
from rsa_hf.tasks.defect_detection import compute_metrics, tokenize
from rsa_hf.training.run import predict_logits

__all__ = ["defect_task", "read_devign"]

FILES = {"train": "train", "validation": "valid", "test": "test"}
SCORED_AT_ONCE = 64


@lru_cache(maxsize=1)  # it takes some seconds, and each run of an experiment asks again
def read_devign() -> dict[str, list[Example]]:
    """All functions of each split; of the training split those that repeat or stand in another are left out.

    Raises:
        FileNotFoundError: the data is not there.
    """
    files = {f"{split}_file": str(data_file(f"devign/{name}.jsonl.xz")) for split, name in FILES.items()}
    return load_defect_data(DefectDataConfig(source="files", **files))  # type: ignore[arg-type]


def defect_task(
    tokenizer: PreTrainedTokenizerBase, *, share: float, most: int, scored: int, length: int, seed: int
) -> Task:
    """Functions and their labels, scored by accuracy.

    Args:
        tokenizer: of the model.
        share: of the training functions.
        most: training functions that count as all of them.
        scored: validation and test functions, each, at most; the same for all seeds.
        length: tokens of a function that the model gets to see.
        seed: of which functions are trained on.

    Raises:
        FileNotFoundError: the data is not there.
    """
    splits = read_devign()
    config = DefectDataConfig(max_length=length)
    everything = _some(splits["train"], most, 0)
    rows = tokenize(_some(everything, round(share * len(everything)), seed), tokenizer, config).remove_columns(
        "example_id"
    )
    join = DataCollatorWithPadding(tokenizer)

    def accuracy_on(split: str) -> Any:
        asked = tokenize(_some(splits[split], scored, 0), tokenizer, config).remove_columns("example_id")
        listed, labels = [*asked], asked["labels"]

        def accuracy(model: Any) -> float:
            logits = predict_logits(model, listed, join, SCORED_AT_ONCE)
            if not logits.isfinite().all():
                return math.nan  # the run diverged: no better than what was before
            return compute_metrics(logits, list(labels))["accuracy"]

        return accuracy

    return Task(
        measure="accuracy",
        higher_is_better=True,
        rows=rows,
        join=join,
        validation=accuracy_on("validation"),
        test=accuracy_on("test"),
    )


def _some(examples: Sequence[Example], count: int, seed: int) -> Sequence[Example]:
    """So many examples, chosen by `seed`; all where there are no more."""
    return examples if count >= len(examples) else Random(seed).sample(examples, count)
