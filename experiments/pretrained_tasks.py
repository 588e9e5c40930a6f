"""What the pretrained models of experiments are trained on: defects in C functions, and texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from experiments.corpora import encode, in_blocks, portion, read_devign, read_splits, sample
from rsa_hf.tasks.defect_scores import compute_metrics
from rsa_hf.tasks.text_data import line_boundary
from rsa_hf.tasks.text_scores import evaluate_language_model

EVALUATION_ROWS, EVALUATION_TOKENS = 64, 4096  # per batch; logits over a large vocabulary need much memory


@dataclass(frozen=True)
class Task:
    """Training data and scores."""

    rows: Any  # to train on
    collate: Callable[[list[Any]], Any]  # rows → a batch
    score: Callable[[Any, str], float]  # (model, "validation" or "test") → accuracy, or nats per token


@torch.no_grad()
def predict_logits(model: Any, rows: Sequence[Mapping[str, Any]], collate: Callable[[list[Any]], Any]) -> Tensor:
    """The logits of a classifier on the CPU, in the order of the rows."""
    model.eval()
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))  # less padding
    logits = []
    for start in range(0, len(order), EVALUATION_ROWS):
        batch = collate([rows[i] for i in order[start : start + EVALUATION_ROWS]])
        inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
        logits.append(model(**inputs).logits.float().cpu())
    return torch.cat(logits)[torch.tensor(order).argsort()]


def defect_task(
    tokenizer: PreTrainedTokenizerBase, *, share: float, most: int, scored: int, length: int, seed: int
) -> Task:
    """Defect detection on Devign, scored by accuracy, on functions cut at `length` tokens.

    `seed` chooses the share of the training functions, of which `most` count as all. At most `scored` validation and
    test functions are scored, the same ones for all seeds.
    """
    splits, collate = read_devign(), DataCollatorWithPadding(tokenizer)
    asked = {split: [*encode(sample(splits[split], scored, 0), tokenizer, length)] for split in ("validation", "test")}
    labels = {split: [row["labels"] for row in rows] for split, rows in asked.items()}

    def accuracy(model: Any, split: str) -> float:
        logits = predict_logits(model, asked[split], collate)
        # NaN for a model that diverged: never better than an earlier score.
        return compute_metrics(logits, labels[split])["accuracy"] if logits.isfinite().all() else math.nan

    everything = sample(splits["train"], most, 0)
    rows = encode(sample(everything, round(share * len(everything)), seed), tokenizer, length)
    return Task(rows, collate, accuracy)


def text_task(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    share: float,
    most: int,
    scored: int,
    length: int,
    seed: int,
    test_seed: int,
) -> Task:
    """Language modelling on `wikitext-2`, or functions of `python` or `c`, in blocks of `length` tokens.

    `seed` chooses the share of the training text, of which `most` bytes count as all; `test_seed` the test text. At
    most `scored` bytes of the validation and test text are scored, in nats per token. Without a tokenizer tokens are
    bytes.
    """
    texts = dict(read_splits("python functions" if name == "python" else name))
    texts["train"] = portion(texts["train"][: line_boundary(texts["train"], 0, most)], share, seed)
    texts["test"] = portion(texts["test"], min(1, scored / len(texts["test"])), test_seed)
    prepared = in_blocks(texts, tokenizer, length, scored)

    def score(model: Any, split: str) -> float:
        text = getattr(prepared, split)
        return evaluate_language_model(model, text, max(1, EVALUATION_TOKENS // length))["loss_nats_per_token"]

    return Task(prepared.train, default_collate, score)
