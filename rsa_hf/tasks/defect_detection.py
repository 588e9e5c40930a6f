"""Defect detection: is a function defective (1) or clean (0)? Its model inputs, collator and metric.

The path of the data is `load_defect_data` → `audit` → `tokenize` → `collator` → `compute_metrics`. A function
too long for the model is truncated, or cut into overlapping chunks. In training each chunk is an example with
the function's label; in evaluation the function's logits are the mean over its chunks, which `compute_metrics`
takes when it is given the example ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import datasets
import torch
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedTokenizerBase

from rsa_hf.tasks.defect_data import DefectDataConfig, Example
from rsa_hf.tasks.metrics import load_metric

__all__ = ["class_weights", "collator", "compute_metrics", "tokenize", "trainer_metrics"]

_BATCH = 1000  # functions handed to the tokenizer at a time: enough for its threads, little for the memory


def tokenize(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DefectDataConfig
) -> datasets.Dataset:
    """Turn functions into model inputs of at most `config.max_length` tokens.

    Args:
        examples: The functions of one split.
        tokenizer: The model's tokenizer.
        config: Its `max_length`, `long_functions` and `chunk_overlap` are used.

    Returns:
        Rows with `input_ids`, `attention_mask`, `labels` and `example_id`, the function's position in
        `examples`. Truncating gives one row a function; chunking gives one or more, which stand together.

    Raises:
        ValueError: If `max_length` leaves no room for text, or not for the overlap of chunks, or if chunks are
            asked of a tokenizer without a fast version.
    """
    chunk = config.long_functions == "chunk"
    room = config.max_length - tokenizer.num_special_tokens_to_add()
    if room < 1:
        raise ValueError(f"max_length is {config.max_length}, all taken by special tokens; choose a larger one")
    if chunk and config.chunk_overlap >= room:
        raise ValueError(
            f"chunk_overlap is {config.chunk_overlap}, but max_length {config.max_length} has room for {room} "
            f"tokens of text; choose from 0 to {room - 1}"
        )
    if chunk and not tokenizer.is_fast:
        raise ValueError(
            f"long_functions is 'chunk', which {type(tokenizer).__name__} cannot do; choose 'truncate', or load "
            "a fast tokenizer"
        )
    windows = {"return_overflowing_tokens": True, "stride": config.chunk_overlap} if chunk else {}
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


def collator(tokenizer: PreTrainedTokenizerBase) -> DataCollatorWithPadding:
    """Make what joins rows of `tokenize` to a batch, padded to its longest row.

    Args:
        tokenizer: The model's tokenizer; its padding token and side are used.

    Returns:
        A collator of int64 tensors: `input_ids` and `attention_mask` [B, T], `labels` and, where the rows have
        it, `example_id` [B].

    Raises:
        ValueError: If the tokenizer has no padding token.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no padding token; set tokenizer.pad_token = tokenizer.eos_token and "
            "model.config.pad_token_id = tokenizer.pad_token_id"
        )
    return DataCollatorWithPadding(tokenizer)


def class_weights(labels: Sequence[int]) -> torch.Tensor:
    """Weights for the loss that make both classes count the same.

    Args:
        labels: The training labels, 0 or 1.

    Returns:
        float32 [2], inversely proportional to the classes' frequencies and with mean 1.

    Raises:
        ValueError: If a class has no examples, or there are labels other than 0 and 1.
    """
    num_positive = sum(label == 1 for label in labels)
    num_negative = sum(label == 0 for label in labels)
    if num_positive + num_negative < len(labels) or not num_positive or not num_negative:
        raise ValueError(
            f"{len(labels)} labels hold {num_negative} times 0 and {num_positive} times 1; "
            "class weights need both classes and no other label"
        )
    # (1/n0, 1/n1) divided by its mean; the common factor n0·n1 cancels.
    return torch.tensor([num_positive, num_negative]) * 2 / len(labels)


_metric = cache(load_metric)


def compute_metrics(logits: Any, labels: Any, example_ids: Any = None) -> dict[str, float]:
    """Score a classifier.

    Args:
        logits: Array or tensor [N, 2]: the scores of clean and defective for each row.
        labels: Integers [N], 0 or 1.
        example_ids: Integers [N], the function each row is part of; its logits are the mean over its rows.
            None where every row is a function.

    Returns:
        `accuracy`, `f1` of the defective class, `mcc`, the `majority_accuracy` to compare with, the
        `positive_share` and the number of functions, `num_examples`.

    Raises:
        ValueError: If shapes do not fit together, logits are not finite, or rows of one function have
            different labels.
    """
    scores = torch.as_tensor(logits).detach().to("cpu", torch.float64)
    targets = torch.as_tensor(labels).detach().to("cpu", torch.int64)
    if scores.ndim != 2 or scores.shape[1] != 2 or targets.shape != scores.shape[:1]:
        raise ValueError(
            f"logits have shape {list(scores.shape)} and labels {list(targets.shape)}; needed are [N, 2] and "
            "[N], as a sequence classifier with num_labels=2 gives"
        )
    if not scores.isfinite().all():
        raise ValueError("logits hold NaN or infinite values, so training has diverged; lower the learning rate")
    if example_ids is not None:
        scores, targets = _joined(scores, targets, torch.as_tensor(example_ids).detach().to("cpu", torch.int64))
    result: dict[str, float] = _metric("defect_detection").compute(
        predictions=scores.argmax(dim=1).tolist(), references=targets.tolist()
    )
    positive_share = targets.double().mean().item()
    return {**result, "positive_share": positive_share, "num_examples": len(targets)}


def _joined(
    scores: torch.Tensor, targets: torch.Tensor, example_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the mean of `scores` [N, 2] over the rows of each function; returns [F, 2] and labels [F]."""
    if example_ids.shape != targets.shape:
        raise ValueError(f"example_ids have shape {list(example_ids.shape)}; needed is {list(targets.shape)}")
    unique: Callable[..., tuple[torch.Tensor, ...]] = torch.unique  # which has no types
    functions, owners, num_rows = unique(example_ids, return_inverse=True, return_counts=True)
    positives = torch.zeros(len(functions), dtype=torch.int64).index_add(0, owners, targets)
    mixed = (positives != 0) & (positives != num_rows)
    if mixed.any():
        raise ValueError(
            f"rows of example_id {functions[mixed][0].item()} have different labels; give each function an id of "
            "its own, and score one split at a time"
        )
    sums = torch.zeros(len(functions), 2, dtype=scores.dtype).index_add(0, owners, scores)
    return sums / num_rows[:, None], (positives > 0).long()


def trainer_metrics(eval_prediction: EvalPrediction) -> dict[str, float]:
    """Score a classifier as the `compute_metrics` of `transformers.Trainer`.

    With `long_functions="chunk"`, pass `label_names=["labels", "example_id"]` to `TrainingArguments`: the
    Trainer then hands on the ids, and the chunks of a function are scored together.

    Args:
        eval_prediction: Logits [N, 2], alone or as the first of the model's outputs, and labels [N], alone or
            followed by the example ids [N].

    Returns:
        What `compute_metrics` returns.

    Raises:
        ValueError: As `compute_metrics` does.
    """
    logits: Any = eval_prediction.predictions
    labels: Any = eval_prediction.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    labels, example_ids = labels if isinstance(labels, tuple) else (labels, None)
    return compute_metrics(logits, labels, example_ids)
