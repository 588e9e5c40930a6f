"""What the pretrained models of experiments are trained on: defects in C functions, and texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from torch.utils.data import default_collate
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from experiments.byte_models import corpus_files
from experiments.runner.data import data_file
from rsa_hf.tasks.defect_data import DefectDataConfig, Example, load_defect_data
from rsa_hf.tasks.defect_detection import compute_metrics, tokenize
from rsa_hf.tasks.language_modeling import evaluate_language_model, prepare_language_modeling
from rsa_hf.tasks.python_defects import load_python_defects
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, line_boundary, read_texts
from rsa_hf.training.run import predict_logits

__all__ = ["Task", "defect_task", "portion", "text_task"]

DEVIGN_FILES = {"train": "train", "validation": "valid", "test": "test"}
TEXT_SCORES = {"bits per byte": "bits_per_byte", "nats per token": "loss_nats_per_token"}
LONGEST_FUNCTION = 10_000  # characters
EVALUATION_ROWS, EVALUATION_TOKENS = 64, 4096  # per batch; logits over a large vocabulary need much memory


@dataclass(frozen=True)
class Task:
    """Training data and scores.

    Attributes:
        measure: name of the score; of "accuracy" more is better, of others less.
        rows: training rows, indexed from 0.
        collate: list of rows → batch.
        score: (model, "validation" or "test") → score; early stopping uses the first.
        predict: model → whether it is right about each test row; None for a text.
    """

    measure: str
    rows: Any
    collate: Callable[[list[Any]], Any]
    score: Callable[[Any, str], float]
    predict: Callable[[Any], Sequence[bool]] | None = None


@lru_cache(maxsize=1)  # shared by the runs of an experiment
def read_devign() -> dict[str, list[Example]]:
    """The functions of each split; training functions that are duplicates or occur in another split are left out.

    Raises:
        FileNotFoundError: the data is missing.
    """
    files = {f"{split}_file": str(data_file(f"devign/{name}.jsonl.xz")) for split, name in DEVIGN_FILES.items()}
    return load_defect_data(DefectDataConfig(source="files", **files))  # type: ignore[arg-type]


def defect_task(
    tokenizer: PreTrainedTokenizerBase, *, share: float, most: int, scored: int, length: int, seed: int
) -> Task:
    """Defect detection on Devign, scored by accuracy.

    Args:
        tokenizer: of the model.
        share: share of the training functions.
        most: number of training functions that count as all of them.
        scored: maximum number of validation and of test functions, the same ones for all seeds.
        length: tokens that the model sees of a function.
        seed: chooses the training functions.
    """
    splits = read_devign()
    collate = DataCollatorWithPadding(tokenizer)

    def encode(examples: Sequence[Example]) -> Any:
        return tokenize(examples, tokenizer, DefectDataConfig(max_length=length)).remove_columns("example_id")

    asked = {split: [*encode(_sample(splits[split], scored, 0))] for split in ("validation", "test")}

    labels = {split: [row["labels"] for row in rows] for split, rows in asked.items()}

    def accuracy(model: Any, split: str) -> float:
        logits = predict_logits(model, asked[split], collate, EVALUATION_ROWS)
        # NaN for a model that diverged: never better than an earlier score.
        return compute_metrics(logits, labels[split])["accuracy"] if logits.isfinite().all() else math.nan

    def predict(model: Any) -> list[bool]:
        logits = predict_logits(model, asked["test"], collate, EVALUATION_ROWS)
        return [bool(guess == label) for guess, label in zip(logits.argmax(-1), labels["test"], strict=True)]

    everything = _sample(splits["train"], most, 0)
    rows = encode(_sample(everything, round(share * len(everything)), seed))
    return Task("accuracy", rows, collate, accuracy, predict)


def _sample(examples: Sequence[Example], count: int, seed: int) -> Sequence[Example]:
    """A random sample, or all examples if there are no more."""
    return examples if count >= len(examples) else Random(seed).sample(examples, count)


@lru_cache(maxsize=1)
def read_splits(name: str) -> dict[str, bytes]:
    """The text of each split: `wikitext-2`, or functions in random order: `c` (Devign), `python` (its library).

    Raises:
        FileNotFoundError: the data is missing.
    """
    if name in ("c", "python"):
        functions = read_devign() if name == "c" else load_python_defects(max_characters=LONGEST_FUNCTION)
        found = {split: [each.func for each in some if not each.kind] for split, some in functions.items()}
        return {split: "\n\n".join(some).encode() for split, some in found.items()}
    return read_texts(LanguageModelingDataConfig(source="files", files=corpus_files(name)))


def portion(text: bytes, share: float, seed: int) -> bytes:
    """A contiguous piece of whole lines, about this share of a text; `seed` chooses where it begins."""
    size = round(share * len(text))
    begin = text.rfind(b"\n", 0, Random(seed).randint(0, len(text) - size)) + 1
    end = begin + size
    return text[begin:end] if end >= len(text) else text[begin : text.rfind(b"\n", begin, end) + 1 or end]


def text_task(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    share: float,
    most: int,
    scored: int,
    length: int,
    seed: int,
    measure: str = "bits per byte",
    test_seed: int | None = None,
) -> Task:
    """Language modelling on blocks of a text.

    Args:
        name: `wikitext-2`, `python` or `c`.
        tokenizer: of the model; None for bytes.
        share: share of the training text.
        most: bytes of the training text that count as all of it.
        scored: maximum bytes of the validation and of the test text.
        length: tokens in a block.
        seed: chooses the portion to train on.
        measure: the score, one of `TEXT_SCORES`.
        test_seed: chooses the test text; None: the beginning of the test split.
    """
    texts = dict(read_splits(name))
    everything = texts["train"][: line_boundary(texts["train"], 0, most)]
    texts["train"] = portion(everything, share, seed)
    if test_seed is not None:
        texts["test"] = portion(texts["test"], min(1, scored / len(texts["test"])), test_seed)
    with TemporaryDirectory() as folder:
        files = {split: Path(folder) / f"{split}.txt" for split in texts}
        for split, text in texts.items():
            files[split].write_bytes(text)
        paths = {split: str(path) for split, path in files.items()}
        config = LanguageModelingDataConfig(source="files", files=paths, block_size=length, max_eval_bytes=scored)
        prepared = prepare_language_modeling(config, tokenizer)

    def score(model: Any, split: str) -> float:
        text = getattr(prepared, split)
        return evaluate_language_model(model, text, max(1, EVALUATION_TOKENS // length))[TEXT_SCORES[measure]]

    return Task(measure, prepared.train, default_collate, score)
