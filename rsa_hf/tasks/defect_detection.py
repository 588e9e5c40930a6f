"""Defect detection, the classification of functions as clean (0) or defective (1): model inputs and metric.

The data passes through `load_defect_data`, `tokenize`, transformers' `DataCollatorWithPadding` and `compute_metrics`.
A function too long for the model is truncated, or cut into overlapping chunks. In training, each chunk is an example
with the function's label. In evaluation, `compute_metrics` averages the logits over a function's chunks, if it is
given the example ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import datasets
import numpy as np
import torch
from transformers import EvalPrediction, PreTrainedTokenizerBase

from rsa_hf.tasks.defect_data import DefectDataConfig, Example
from rsa_hf.tasks.metrics import load_metric

__all__ = ["class_weights", "compute_metrics", "tokenize", "trainer_metrics"]

_BATCH = 1000  # functions per call of the tokenizer: enough for its threads, bounded in memory


def tokenize(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DefectDataConfig
) -> datasets.Dataset:
    """Turn functions into model inputs of at most `config.max_length` tokens.

    Args:
        examples: The functions of one split.
        tokenizer: The model's tokenizer; a fast one for chunks.
        config: Provides `max_length`, `long_functions` and `chunk_overlap`.

    Returns:
        Rows with `input_ids`, `attention_mask`, `labels` and `example_id`, the function's index in `examples`.
        Truncation gives one row per function, chunking one or more consecutive rows.

    Raises:
        ValueError: `max_length` leaves no room for text, or not more than the overlap of chunks.
    """
    chunk = config.long_functions == "chunk"
    room = config.max_length - tokenizer.num_special_tokens_to_add()
    overlap = config.chunk_overlap if chunk else 0
    if not 0 <= overlap < room:
        raise ValueError(
            f"max_length is {config.max_length}, which leaves room for {room} tokens of text"
            + (f", but chunk_overlap is {overlap}; choose from 0 to below the room" if chunk else "; choose more")
        )
    windows = {"return_overflowing_tokens": True, "stride": overlap} if chunk else {}
    rows: dict[str, list[Any]] = {"input_ids": [], "attention_mask": [], "labels": [], "example_id": []}
    for start in range(0, len(examples), _BATCH):
        texts = [example.func for example in examples[start : start + _BATCH]]
        encoded = tokenizer(
            texts, truncation=True, max_length=config.max_length, return_attention_mask=True, **windows
        )
        owners = encoded["overflow_to_sample_mapping"] if chunk else range(len(texts))
        rows["input_ids"] += encoded["input_ids"]
        rows["attention_mask"] += encoded["attention_mask"]
        rows["labels"] += [examples[start + owner].target for owner in owners]
        rows["example_id"] += [start + owner for owner in owners]
    return datasets.Dataset.from_dict(rows)


def class_weights(labels: Sequence[int]) -> torch.Tensor:
    """Weights for the loss that give both classes the same influence.

    Args:
        labels: The training labels, with examples of both 0 and 1.

    Returns:
        float32 [2], inversely proportional to the class frequencies, with mean 1.
    """
    # (1/n0, 1/n1) divided by its mean; the common factor n0·n1 cancels.
    return torch.tensor([sum(labels), len(labels) - sum(labels)]) * 2 / len(labels)


_metric = cache(load_metric)


def compute_metrics(logits: Any, labels: Any, example_ids: Any = None) -> dict[str, float]:
    """Score a classifier.

    Args:
        logits: Array or tensor [N, 2], the scores of clean and defective for each row.
        labels: Integers [N], 0 or 1.
        example_ids: Integers [N], the function that each row belongs to; its logits are averaged over its rows. None:
            each row is a function.

    Returns:
        `accuracy`, `f1` of the defective class, `mcc`, the `majority_accuracy` to compare with, `positive_share`, and
        the number of functions, `num_examples`.

    Raises:
        ValueError: Shapes do not match, logits are not finite, or rows of one function have different labels.
    """
    scores = torch.as_tensor(logits).detach().to("cpu", torch.float64).numpy()
    targets = torch.as_tensor(labels).detach().cpu().numpy()
    if scores.ndim != 2 or scores.shape[1] != 2 or targets.shape != scores.shape[:1]:
        raise ValueError(
            f"logits have shape {list(scores.shape)} and labels {list(targets.shape)}; needed are [N, 2] and [N], as "
            "a sequence classifier with num_labels=2 returns"
        )
    if not np.isfinite(scores).all():
        raise ValueError("logits hold NaN or infinite values, so training has diverged; lower the learning rate")
    if example_ids is not None:
        _, first, owners = np.unique(torch.as_tensor(example_ids).cpu(), return_index=True, return_inverse=True)
        if owners.shape != targets.shape or (targets != targets[first][owners]).any():
            raise ValueError("example_ids do not match the labels: each function has one label, in one split")
        scores = np.stack([np.bincount(owners, column) for column in scores.T], axis=1)  # sums do as well as means
        targets = targets[first]
    result: dict[str, float] = _metric("defect_detection").compute(
        predictions=scores.argmax(axis=1), references=targets
    )
    return {**result, "positive_share": float(targets.mean()), "num_examples": len(targets)}


def trainer_metrics(eval_prediction: EvalPrediction) -> dict[str, float]:
    """Score a classifier; the `compute_metrics` of `transformers.Trainer`.

    For `long_functions="chunk"`, pass `label_names=["labels", "example_id"]` to `TrainingArguments`. The Trainer then
    passes on the example ids, and the chunks of a function are scored together.

    Args:
        eval_prediction: Logits [N, 2], or a tuple that begins with them, and labels [N], or labels and example ids.

    Returns:
        The result of `compute_metrics`.

    Raises:
        ValueError: As `compute_metrics`.
    """
    logits: Any = eval_prediction.predictions
    labels: Any = eval_prediction.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    labels, example_ids = labels if isinstance(labels, tuple) else (labels, None)
    return compute_metrics(logits, labels, example_ids)
