"""Defect detection: the classification of functions as clean (0) or defective (1).

A function too long for the model is truncated, or cut into overlapping chunks. In training, each chunk is an example
with the function's label. In evaluation, `compute_metrics` averages the logits over a function's chunks.

The config of a trained model has an entry `defect_detection`: the threshold that its run chose, and how functions
were cut.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from rsa_hf.patching import is_patched
from rsa_hf.plots import plot_confusion
from rsa_hf.tasks import defect_scores
from rsa_hf.tasks.data_files import read_table
from rsa_hf.tasks.defect_audit import audit, format_audit, word_count_baseline
from rsa_hf.tasks.defect_data import DefectDataConfig, load_defect_data, read_examples
from rsa_hf.tasks.python_defects import Example
from rsa_hf.training.arguments import ModelArguments, RSATrainingArguments, RunArguments, read_arguments
from rsa_hf.training.checkpoints import RunFolder, digest
from rsa_hf.training.model_setup import load_model, load_tokenizer, load_with_head, patch_for_run, require_inputs_fit
from rsa_hf.training.rsa_trainer import RSATrainer
from rsa_hf.training.run_training import finish_run, train_to_end
from rsa_hf.utils.files import write_text
from rsa_hf.utils.locate import expanded
from rsa_hf.utils.text import finite_or_null, percent

LABELS = {0: "clean", 1: "defective"}
SAVED = "defect_detection"  # entry of the model's config
CUTTING = ("max_seq_length", "long_functions", "chunk_overlap")  # settings in that entry


def main(arguments: Sequence[str]) -> None:
    """Train a defect detector, evaluate it, and write all results to the output folder; see `read_arguments`."""
    run = read_arguments(arguments, DefectDataConfig)
    args, data = run.training, run.data
    if args.dataloader_drop_last:
        raise ValueError("dataloader_drop_last=true: would leave functions out of the scores. Leave it out.")
    set_seed(args.seed)
    with args.main_process_first():  # the other processes then find its downloads in the cache
        splits = load_defect_data(data)
        texts = (repr((split, e.func, e.target, e.idx)).encode() for split, part in splits.items() for e in part)
        folder = RunFolder(run, digest(texts))
        if folder.had_finished():
            return
        model, tokenizer = _model_and_tokenizer(run.model, data)
    saved = {name: getattr(data, name) for name in CUTTING}
    setattr(model.config, SAVED, saved)  # so that each checkpoint has it
    tokenizer.model_max_length = data.max_seq_length
    if len({example.target for example in splits.get("validation", [])}) < 2:
        raise ValueError(
            "the data has no validation split of both classes to choose the threshold by. Add one, or make one from "
            "the training functions by split_by."
        )
    rows, tokens = {}, {}
    for split, examples in splits.items():
        rows[split], tokens[split] = _rows_and_tokens(examples, tokenizer, data)
    if args.should_save:
        print(f"data: {data.origin}")
        report = audit(splits, tokens, data.max_seq_length) | {"split_by": data.split_by}
        report["word_counts"] = words = word_count_baseline(splits)
        print(format_audit(report))
        write_text(args.folder / "audit.json", json.dumps(finite_or_null(report), indent=2) + "\n")
    collate = DataCollatorWithPadding(tokenizer)
    inputs = rows["train"].remove_columns("example_id")
    calibration = patch_for_run(model, inputs, collate, run)
    args.label_names = ["labels", "example_id"]
    args.remove_unused_columns = args.prediction_loss_only = False
    args.eval_do_concat_batches = True
    weights = class_weights(rows["train"]["labels"]) if data.class_weights else None
    trainer = _Trainer(
        model=model,
        args=args,
        train_dataset=inputs,
        eval_dataset=rows["validation"],
        data_collator=collate,
        processing_class=tokenizer,
        compute_metrics=defect_scores.trainer_metrics,
        compute_loss_func=partial(_loss, weights=weights, smoothing=args.label_smoothing_factor),
    )
    train_to_end(trainer, folder, defect_scores.compute_metrics([[1, 0], [0, 1]], [0, 1]))
    logits = {
        split: defect_scores.functions_of(trainer.predict(rows[split], metric_key_prefix=split))
        for split in rows
        if split != "train"
    }
    threshold = defect_scores.choose_threshold(*logits["validation"])
    scores = {split: _scores(splits[split], found, threshold) for split, found in logits.items()}
    assert trainer.model is not None
    setattr(trainer.model.config, SAVED, {"threshold": threshold, **saved})
    table, notes = [], []
    if args.should_save:
        for split, found in logits.items():
            with suppress(ImportError):  # no matplotlib, as `finish_run` reports
                plot_confusion(found[1], found[0].argmax(axis=1), args.folder / f"confusion_{split}.png")
            notes += _notes(split, scores[split], defect_scores.bootstrap_intervals(*found))
        if "test" in logits:
            rows_of_test = _predictions(splits["test"], logits["test"][0], threshold)
            for_codexglue = "".join(f"{row['idx']}\t{int(row['score'] > 0.5)}\n" for row in rows_of_test)
            write_text(args.folder / "predictions.txt", for_codexglue)
            write_text(args.folder / "predictions.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows_of_test))
        table = _table("with RSA" if is_patched(model) else "plain", scores, words)
    finish_run(trainer, run, folder, {**scores, "calibration": calibration}, table, notes)


def audit_data(arguments: Sequence[str]) -> dict[str, Any]:
    """The `audit` of the data of a run without `deduplicate`, with the scores of `word_count_baseline`.

    The settings of the data are used, and `tokenizer_name` or `model_name_or_path`; without one of these two, the
    number of tokens is not known.
    """
    run = read_arguments(arguments, DefectDataConfig)
    run.data.deduplicate = False
    splits, tokens = load_defect_data(run.data), None
    if source := run.model.tokenizer_name or run.model.model_name_or_path:
        tokenizer = load_tokenizer(source, split_special_tokens=True)  # `</s>` in a function does not end it
        tokens = {split: _rows_and_tokens(examples, tokenizer, run.data)[1] for split, examples in splits.items()}
    report = audit(splits, tokens, run.data.max_seq_length) | {"split_by": run.data.split_by}
    return report | {"word_counts": word_count_baseline(splits)}


class _Trainer(RSATrainer):
    """Passes no `example_id` to the model, but keeps it among the labels for `compute_metrics`."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **keywords: Any) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "example_id"}
        return super().compute_loss(model, inputs, *args, **keywords)


def _loss(
    outputs: Any, labels: Tensor, num_items_in_batch: Any = None, weights: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """The weighted loss of a micro-batch, as its share of the mean over the functions of a step."""
    logits = outputs.logits.float()
    weights = None if weights is None else weights.to(logits)
    total = cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing)
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def _model_and_tokenizer(
    arguments: ModelArguments, data: DefectDataConfig
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The plain model and its tokenizer, with a padding token, after a trial of the longest input."""
    source = arguments.tokenizer_name or arguments.model_name_or_path
    if source is None:
        raise ValueError(
            "model_name_or_path=None: name a pretrained model, on the Hub or a folder; or for one from scratch a "
            "model_type and a tokenizer_name."
        )
    tokenizer = load_tokenizer(source, split_special_tokens=True)  # `</s>` in a function does not end it
    words = {"id2label": LABELS, "label2id": {label: number for number, label in LABELS.items()}}
    model = load_model(AutoModelForSequenceClassification, arguments, num_labels=2, **words)
    _fit_to_each_other(model, tokenizer, data)
    return model, tokenizer


def plain_model_and_rows(arguments: Sequence[str]) -> tuple[PreTrainedModel, Any, Any]:
    """The model of a run without RSA heads, its training data, and the collator of its rows."""
    run = read_arguments(arguments, DefectDataConfig)
    set_seed(run.training.seed)
    model, tokenizer = _model_and_tokenizer(run.model, run.data)
    rows = tokenize(load_defect_data(run.data)["train"], tokenizer, run.data)
    return model, rows.remove_columns("example_id"), DataCollatorWithPadding(tokenizer)


def _scores(examples: Sequence[Example], found: tuple[Any, Any], threshold: float | None) -> dict[str, float]:
    """The scores of functions and, if they are paired, the pair rates at the threshold 0.5."""
    return defect_scores.compute_metrics(*found, threshold=threshold) | defect_scores.pair_rates_of(
        examples, found[0].argmax(axis=1)
    )


def _table(
    name: str, scores: Mapping[str, Mapping[str, float]], words: Mapping[str, Mapping[str, float]]
) -> list[list[str]]:
    """The scores of each split at the threshold 0.5 and at the chosen one, below those of the word-count baseline."""
    of_classes = {"accuracy": "accuracy", "F1": "f1", "precision": "precision", "recall": "recall", "MCC": "mcc"}
    of_classes["called defective"] = "predicted_positive_share"
    of_scores = {"ROC AUC": "roc_auc", "AP": "average_precision", "VD-S": "vd_score"}
    table = [["model", "split", "threshold", *of_classes, *of_scores]]
    for split, figures in scores.items():
        for row, of, at in (
            ("counts of words", words[split], ""),
            (name, figures, ""),
            (name, figures, "_at_threshold"),
        ):
            cells = [of[f"{key}{at}"] for key in of_classes.values()] + [of[key] for key in of_scores.values()]
            threshold = f"{of['threshold']:.4g}" if at else "0.5"
            table.append([row, split, threshold, *map(percent, cells)])
    return table


def _notes(split: str, scores: Mapping[str, float], intervals: Mapping[str, Sequence[float]]) -> list[str]:
    """Notes on the rows of a split in the table, one per line."""
    shown = ("accuracy", "f1", "average_precision", "vd_score")
    ranges = ", ".join(f"{name} {percent(low)} … {percent(high)}" for name in shown for low, high in [intervals[name]])
    size, share = scores["num_examples"], scores["positive_share"]
    notes = [f"{split}: {size:,} functions, {share:.2%} of them defective; 95 % intervals at 0.5: {ranges}"]
    if split == "validation":
        chosen = f"{scores['threshold']:.4g} has the highest MCC on validation; it can lower accuracy"
        notes.append(f"threshold: {chosen}")
    if "pair_correct" in scores:
        rates = {key: f"{value:.2%}" for key, value in scores.items() if key.startswith("pair_")}
        notes.append(
            f"pairs of {split}: told apart {rates['pair_correct']}, both called defective {rates['pair_vulnerable']}, "
            f"both called clean {rates['pair_benign']}, reversed {rates['pair_reversed']}"
        )
    if scores["predicted_positive_share"] in (0, 1):
        answer = LABELS[int(scores["predicted_positive_share"])]
        notes.append(f"WARNING: all functions of {split} are called {answer} at 0.5. See MCC and AP, not accuracy.")
    return notes


def _predictions(examples: Sequence[Example], logits: Any, threshold: float) -> list[dict[str, Any]]:
    """The result for each function, as `predict` returns it."""
    scores = defect_scores.probabilities(logits).tolist()
    return [
        {"idx": i if each.idx is None else each.idx, "score": score, "label": LABELS[int(score > threshold)]}
        for i, (each, score) in enumerate(zip(examples, scores, strict=True))
    ]


def evaluate(name: str, split: str, arguments: Sequence[str], threshold: float | None = None) -> dict[str, Any]:
    """Score a saved defect detector, a folder or a name on the Hub, on the split "validation" or "test".

    The settings used are the data of this split and `per_device_eval_batch_size`. Functions are cut as in the model's
    training, whatever a settings file says; only `--key value` overrides this. The threshold is that of
    `compute_metrics`; None: the one that the run of this model chose, if any.

    Returns:
        The scores of `compute_metrics`, the `pair_rates` of paired data, and `bootstrap_intervals` as "intervals".
    """
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold}: a probability from 0 to 1 is needed.")
    run, model, tokenizer = _saved(name, arguments)
    splits = load_defect_data(run.data, only=split)
    if split not in splits:
        raise ValueError(f"the data has no {split} split to score. Choose validation, or test if the data has one.")
    print(
        f"scored: {len(splits[split]):,} functions, {split} of {run.data.files.get(split, run.data.origin)}",
        file=sys.stderr,
    )
    logits = _logits(model, tokenizer, splits[split], run)
    if threshold is None:
        threshold = getattr(model.config, SAVED, {}).get("threshold")
    return {**_scores(splits[split], logits, threshold), "intervals": defect_scores.bootstrap_intervals(*logits)}


def predict(name: str, path: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Score functions without labels with a saved defect detector.

    Args:
        name: its folder, or its name on the Hub.
        path: a file of functions: JSON lines, a JSON array, CSV or Parquet, perhaps compressed.
        arguments: settings of a run, as for `evaluate`.

    Returns:
        For each function its `idx`, or else its place from 0; `score`, the probability of a defect; and `label`,
        clean or defective by the threshold that the model's run chose, else by 0.5.
    """
    run, model, tokenizer = _saved(name, arguments)
    examples = read_examples(read_table(expanded(path)), run.data, labelled=False)
    if not examples:
        raise ValueError(f"{path} has no functions.")
    threshold = getattr(model.config, SAVED, {}).get("threshold", 0.5)
    return _predictions(examples, _logits(model, tokenizer, examples, run)[0], threshold)


def _saved(
    name: str, arguments: Sequence[str]
) -> tuple[RunArguments[DefectDataConfig], PreTrainedModel, PreTrainedTokenizerBase]:
    """The settings, with the saved detector's way of cutting functions, the detector, and its tokenizer."""
    run = read_arguments(arguments, DefectDataConfig)
    tokenizer = load_tokenizer(name)
    model = load_with_head(AutoModelForSequenceClassification, name)
    if model.config.num_labels != 2:
        raise ValueError(f"{name} tells {model.config.num_labels} classes apart, defect detection has 2.")
    if (word := getattr(model.config, "id2label", {}).get(1)) not in ("LABEL_1", LABELS[1]):
        print(f"{name}: the score is the probability of its class 1, {word!r}.", file=sys.stderr)
    for key, value in getattr(model.config, SAVED, {}).items():
        if key in CUTTING and key not in run.from_command_line:
            setattr(run.data, key, value)
    _fit_to_each_other(model, tokenizer, run.data)
    return run, model, tokenizer


def _logits(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    run: RunArguments[DefectDataConfig],
) -> tuple[Any, Any]:
    """Logits [N, 2] and labels [N] of functions."""
    with TemporaryDirectory() as folder:
        args = RSATrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=run.training.per_device_eval_batch_size,
            label_names=["labels", "example_id"],
            remove_unused_columns=False,
            disable_tqdm=run.training.disable_tqdm,
            use_cpu=run.training.use_cpu,
            bf16=run.training.bf16,
            fp16=run.training.fp16,
        )
        trainer = _Trainer(model=model, args=args, data_collator=DataCollatorWithPadding(tokenizer))
        return defect_scores.functions_of(trainer.predict(tokenize(examples, tokenizer, run.data)))


def _fit_to_each_other(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DefectDataConfig) -> None:
    """Set the padding token of both, and check that the model takes the tokenizer's tokens and the longest input."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no padding token and no end token. Set pad_token in its files.")
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    require_inputs_fit(model, tokenizer, data.max_seq_length, "max_seq_length")


def tokenize(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DefectDataConfig
) -> datasets.Dataset:
    """Turn functions into model inputs of at most `config.max_seq_length` tokens.

    Args:
        examples: the functions of one split.
        tokenizer: the model's tokenizer; chunks need a fast one.
        config: provides `max_seq_length`, `long_functions` and `chunk_overlap`.

    Returns:
        Rows with `input_ids`, `attention_mask`, `labels` and `example_id`, the function's index in `examples`.
        Truncation gives one row per function, chunking one or more consecutive rows.

    Raises:
        ValueError: `max_seq_length` leaves no room for text, or no more room than the overlap of chunks.
    """
    return _rows_and_tokens(examples, tokenizer, config)[0]


def _rows_and_tokens(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DefectDataConfig
) -> tuple[datasets.Dataset, list[int]]:
    """What `tokenize` returns, and the number of tokens of each function, uncut; empty if the tokenizer is slow."""
    chunk = config.long_functions == "chunk"
    special = tokenizer.num_special_tokens_to_add()
    room = config.max_seq_length - special
    overlap = config.chunk_overlap if chunk else 0
    if not 0 <= overlap < room:
        raise ValueError(
            f"max_seq_length={config.max_seq_length}: leaves room for {room} tokens of text"
            + (f", chunk_overlap is {overlap}; choose it from 0 to below the room." if chunk else "; choose more.")
        )
    windows = {"return_overflowing_tokens": True, "stride": overlap} if chunk else {}
    rows: dict[str, list[Any]] = {"input_ids": [], "attention_mask": [], "labels": [], "example_id": []}
    tokens = [special + overlap] * len(examples) if tokenizer.is_fast else []
    # Batches keep the tokenizer's threads busy, and bound the memory.
    for start in tqdm(range(0, len(examples), 1000), desc="tokenising", unit="thousand", leave=False, delay=5):
        texts = [example.func for example in examples[start : start + 1000]]
        encoded = tokenizer(
            texts, truncation=True, max_length=config.max_seq_length, return_attention_mask=True, **windows
        )
        owners = [start + i for i in encoded.get("overflow_to_sample_mapping", range(len(texts)))]
        rows["input_ids"] += encoded["input_ids"]
        rows["attention_mask"] += encoded["attention_mask"]
        rows["labels"] += [examples[owner].target for owner in owners]
        rows["example_id"] += owners
        for owner, encoding in zip(owners, encoded.encodings or (), strict=False):
            # What was cut off is in `overflowing`, unless it has rows of its own.
            pieces = [encoding] if chunk else [encoding, *encoding.overflowing]
            tokens[owner] += sum(len(piece.ids) - special for piece in pieces) - overlap
    return datasets.Dataset.from_dict(rows), tokens


def class_weights(labels: Sequence[int]) -> torch.Tensor:
    """Weights [2] for the loss: inversely proportional to the frequencies of classes 0 and 1, with mean 1."""
    # (1/n0, 1/n1) divided by its mean; the common factor n0·n1 cancels.
    return torch.tensor([sum(labels), len(labels) - sum(labels)], device="cpu") * 2 / len(labels)
