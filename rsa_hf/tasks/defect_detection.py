"""Defect detection, the classification of functions as clean (0) or defective (1).

A function too long for the model is truncated, or cut into overlapping chunks. In training, each chunk is an example
with the function's label. In evaluation, `compute_metrics` averages the logits over a function's chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from rsa_hf.patching import is_patched
from rsa_hf.tasks.defect_data import DefectDataConfig, audit, format_audit, in_batches, load_defect_data
from rsa_hf.tasks.defect_scores import by_function, choose_threshold, compute_metrics, parts_of, trainer_metrics
from rsa_hf.tasks.python_defects import Example
from rsa_hf.training.arguments import ModelArguments, RSATrainingArguments, read_arguments
from rsa_hf.training.checkpoints import RunFolder, digest
from rsa_hf.training.model_setup import load_model, patch_for_run, require_head, require_inputs_fit
from rsa_hf.training.rsa_trainer import RSATrainer
from rsa_hf.training.run_training import finish_run, train_to_end
from rsa_hf.utils.files import write_text
from rsa_hf.utils.locate import locate


def main(arguments: Sequence[str]) -> None:
    """Train a defect detector, evaluate it, and write all results to the output folder; see `read_arguments`."""
    run = read_arguments(arguments, DefectDataConfig)
    args, data = run.training, run.data
    set_seed(args.seed)
    with args.main_process_first():  # the other processes then find its downloads in the cache
        splits = load_defect_data(data)
        texts = (repr((split, e.func, e.target)).encode() for split, part in splits.items() for e in part)
        folder = RunFolder(run, digest(texts))
        if folder.had_finished():
            return
        model, tokenizer = _model_and_tokenizer(run.model, data)
    if "validation" not in splits:
        raise ValueError("the data has no validation split to choose the best model by. Add one.")
    rows = {split: tokenize(examples, tokenizer, data) for split, examples in splits.items()}
    if args.should_save:
        filled = {split: _share_filled(each, data.max_seq_length) for split, each in rows.items()}
        report = audit(splits, filled, data.max_seq_length)
        print(format_audit(report))
        args.folder.mkdir(parents=True, exist_ok=True)
        write_text(args.folder / "audit.json", json.dumps(report, indent=2) + "\n")
    collate = DataCollatorWithPadding(tokenizer)
    inputs = rows["train"].remove_columns("example_id")
    calibration = patch_for_run(model, inputs, collate, run)
    args.label_names = ["labels", "example_id"]
    args.remove_unused_columns = False
    weights = class_weights(rows["train"]["labels"]) if data.class_weights else None
    trainer = _Trainer(
        model=model,
        args=args,
        train_dataset=inputs,
        eval_dataset=rows["validation"],
        data_collator=collate,
        processing_class=tokenizer,
        compute_metrics=trainer_metrics,
        compute_loss_func=partial(_loss, weights=weights),
    )
    train_to_end(trainer, folder)
    predictions = {split: trainer.predict(rows[split], metric_key_prefix=split) for split in rows if split != "train"}
    threshold = choose_threshold(*parts_of(predictions["validation"]))
    scores = {split: compute_metrics(*parts_of(each), threshold) for split, each in predictions.items()}
    if "test" in predictions and args.should_save:
        text = _codexglue_predictions(splits["test"], *parts_of(predictions["test"]))
        write_text(args.folder / "predictions.txt", text)
    table = _table("with RSA" if is_patched(model) else "plain", scores)
    finish_run(trainer, run, folder, {**scores, "calibration": calibration}, table)


class _Trainer(RSATrainer):
    """Passes no `example_id` to the model, but keeps it among the labels for `compute_metrics`."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **keywords: Any) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "example_id"}
        return super().compute_loss(model, inputs, *args, **keywords)


def _loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None, weights: Tensor | None = None) -> Tensor:
    """The weighted loss of a micro-batch, as its share of the mean over the functions of a step."""
    logits = outputs.logits.float()
    total = cross_entropy(logits, labels, None if weights is None else weights.to(logits), reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def _model_and_tokenizer(
    arguments: ModelArguments, data: DefectDataConfig
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The plain model and its tokenizer, with a padding token, after a trial of the longest input."""
    source = arguments.tokenizer_name or arguments.model_name_or_path
    if source is None:
        raise ValueError("tokenizer_name=None: a model from scratch needs one; name one on the Hub, or a folder.")
    tokenizer = AutoTokenizer.from_pretrained(locate(source))
    model = load_model(AutoModelForSequenceClassification, arguments, num_labels=2)
    _fit_to_each_other(model, tokenizer, data)
    return model, tokenizer


def plain_model_and_rows(arguments: Sequence[str]) -> tuple[PreTrainedModel, Any, Any]:
    """The model of a run without RSA heads, its training data, and what makes a batch of rows."""
    run = read_arguments(arguments, DefectDataConfig)
    set_seed(run.training.seed)
    model, tokenizer = _model_and_tokenizer(run.model, run.data)
    rows = tokenize(load_defect_data(run.data)["train"], tokenizer, run.data)
    return model, rows.remove_columns("example_id"), DataCollatorWithPadding(tokenizer)


def _share_filled(rows: datasets.Dataset, max_length: int) -> float:
    """The share of functions of `max_length` or more tokens."""
    full = {owner for ids, owner in zip(rows["input_ids"], rows["example_id"], strict=True) if len(ids) >= max_length}
    return len(full) / len(set(rows["example_id"]))


def _table(name: str, scores: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """The scores of each split, at the threshold 0.5 and at the chosen one."""
    table = [["model", "split", "threshold", "accuracy", "majority class", "F1", "MCC", "ROC AUC", "AP", "functions"]]
    for split, figures in scores.items():
        for threshold, at in ((0.5, ""), (figures["threshold"], "_at_threshold")):
            shares = (f"{figures[key]:.2%}" for key in (f"accuracy{at}", "majority_accuracy"))
            numbers = (f"{figures[key]:.4f}" for key in (f"f1{at}", f"mcc{at}", "roc_auc", "average_precision"))
            table.append([name, split, f"{threshold:.4g}", *shares, *numbers, f"{figures['num_examples']:,}"])
    return table


def _codexglue_predictions(examples: Sequence[Example], logits: Any, labels: Any, example_ids: Any) -> str:
    """The predicted classes as CodeXGLUE's evaluator reads them: lines of `idx` or place, a tab, 0 or 1."""
    functions, _ = by_function(logits, labels, example_ids)
    classes = zip(examples, functions.argmax(axis=1), strict=True)
    return "".join(f"{i if each.idx is None else each.idx}\t{label}\n" for i, (each, label) in enumerate(classes))


def evaluate(name: str, split: str, arguments: Sequence[str], threshold: float | None = None) -> dict[str, float]:
    """Score a saved defect detector, a folder or a name on the Hub, on the split "validation" or "test".

    Of the settings, the data of this split and `per_device_eval_batch_size` are used. The threshold is that of
    `compute_metrics`; None: the one that the run of this folder chose, if it is one.
    """
    run = read_arguments(arguments, DefectDataConfig)
    tokenizer = AutoTokenizer.from_pretrained(locate(name))
    model = require_head(AutoModelForSequenceClassification, name)
    if model.config.num_labels != 2:
        raise ValueError(f"{name} tells {model.config.num_labels} classes apart, defect detection has 2.")
    _fit_to_each_other(model, tokenizer, run.data)
    splits = load_defect_data(run.data, only=split)
    if split not in splits:
        raise ValueError(f"the data has no {split} split to score. Choose validation, or test if the data has one.")
    rows = tokenize(splits[split], tokenizer, run.data)
    if threshold is None:
        with suppress(OSError, ValueError, TypeError, KeyError):  # what a run chose stands beside its model
            results = Path(locate(name), "all_results.json").read_text(encoding="utf-8")
            threshold = float(json.loads(results)["eval_threshold"])
    with TemporaryDirectory() as folder:
        args = RSATrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=run.training.per_device_eval_batch_size,
            label_names=["labels", "example_id"],
            remove_unused_columns=False,
            disable_tqdm=run.training.disable_tqdm,
            use_cpu=run.training.use_cpu,
        )
        trainer = _Trainer(model=model, args=args, data_collator=DataCollatorWithPadding(tokenizer))
        return compute_metrics(*parts_of(trainer.predict(rows)), threshold)


def _fit_to_each_other(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DefectDataConfig) -> None:
    """Set the padding token of both, and check that the model takes the tokenizer's tokens and the longest input."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    require_inputs_fit(model, tokenizer, data.max_seq_length, "max_seq_length")


def tokenize(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DefectDataConfig
) -> datasets.Dataset:
    """Turn functions into model inputs of at most `config.max_seq_length` tokens.

    Args:
        examples: the functions of one split.
        tokenizer: the model's tokenizer; a fast one for chunks.
        config: provides `max_seq_length`, `long_functions` and `chunk_overlap`.

    Returns:
        Rows with `input_ids`, `attention_mask`, `labels` and `example_id`, the function's index in `examples`.
        Truncation gives one row per function, chunking one or more consecutive rows.

    Raises:
        ValueError: `max_seq_length` leaves no room for text, or not more than the overlap of chunks.
    """
    chunk = config.long_functions == "chunk"
    room = config.max_seq_length - tokenizer.num_special_tokens_to_add()
    overlap = config.chunk_overlap if chunk else 0
    if not 0 <= overlap < room:
        raise ValueError(
            f"max_seq_length={config.max_seq_length}: leaves room for {room} tokens of text"
            + (f", chunk_overlap is {overlap}; choose it from 0 to below the room." if chunk else "; choose more.")
        )
    windows = {"return_overflowing_tokens": True, "stride": overlap} if chunk else {}
    rows: dict[str, list[Any]] = {"input_ids": [], "attention_mask": [], "labels": [], "example_id": []}
    first = 0  # index of the first function of a batch
    for texts in in_batches(examples):
        encoded = tokenizer(
            texts, truncation=True, max_length=config.max_seq_length, return_attention_mask=True, **windows
        )
        owners = [first + i for i in encoded.get("overflow_to_sample_mapping", range(len(texts)))]
        rows["input_ids"] += encoded["input_ids"]
        rows["attention_mask"] += encoded["attention_mask"]
        rows["labels"] += [examples[owner].target for owner in owners]
        rows["example_id"] += owners
        first += len(texts)
    return datasets.Dataset.from_dict(rows)


def class_weights(labels: Sequence[int]) -> torch.Tensor:
    """Weights [2] for the loss: inversely proportional to the frequencies of classes 0 and 1, with mean 1."""
    # (1/n0, 1/n1) divided by its mean; the common factor n0·n1 cancels.
    return torch.tensor([sum(labels), len(labels) - sum(labels)], device="cpu") * 2 / len(labels)
