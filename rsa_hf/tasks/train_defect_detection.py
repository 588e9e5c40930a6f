"""Train a defect detector, patched or plain, and score one: what `scripts/train_defect_detection.py` runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from accelerate.utils import set_seed
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rsa_hf.patching import is_patched
from rsa_hf.tasks import defect_detection as task
from rsa_hf.tasks.audit import audit, format_audit
from rsa_hf.tasks.defect_data import DefectDataConfig, Example, load_defect_data
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.loop import make_accelerator, train
from rsa_hf.training.run import (
    load_model,
    predict_logits,
    report_results,
    require_tokens_known,
)
from rsa_hf.utils.files import sole_writer, write_text
from rsa_hf.utils.locate import locate

__all__ = ["evaluate", "main"]


def main(arguments: Sequence[str]) -> None:
    """Train, keep the best model, score it, and leave all of it in the output folder.

    Args:
        arguments: a YAML file and `--key value` settings, as `read_run_config` takes them.

    Raises:
        OSError, ValueError: a file, a name or a setting does not fit.
        TrainingDivergedError: the loss is no number any longer.
    """
    config = read_run_config(arguments, DefectDataConfig)
    training, output = config.training, Path(config.training.output_dir)
    accelerator = make_accelerator(training.mixed_precision)
    set_seed(training.seed)
    source = config.model.tokenizer or config.model.name_or_path
    if source is None:
        raise ValueError("model.tokenizer=None: a model from scratch needs one; name one on the Hub, or a folder.")
    with accelerator.main_process_first():  # the others then find what the first has downloaded
        tokenizer = AutoTokenizer.from_pretrained(locate(source))
        model = load_model(AutoModelForSequenceClassification, config.model, config.rsa, num_labels=2)
        splits = load_defect_data(config.data)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    require_tokens_known(model, len(tokenizer))
    _require_room(model, tokenizer, config.data.max_length)
    if "validation" not in splits:
        raise ValueError("the data has no validation split, by which the best model is chosen. Give one.")
    if accelerator.is_main_process:
        report = audit(splits, tokenizer, config.data.max_length)
        print(format_audit(report))
        with sole_writer(output):
            write_text(output / "audit.json", json.dumps(report, indent=2) + "\n")
    score = _scorer(splits, tokenizer, config.data, training.eval_batch_size)
    inputs = _inputs(task.tokenize(splits["train"], tokenizer, config.data))
    labels = [example.target for example in splits["train"]]
    result = train(
        model,
        inputs,
        task.collator(tokenizer),
        lambda model: score(model, "validation"),
        training,
        best_metric="accuracy",
        greater_is_better=True,
        class_weights=task.class_weights(labels).tolist() if training.class_weights else None,
        tokenizer=tokenizer,
        settings=config.to_dict(),
        accelerator=accelerator,
    )
    if not accelerator.is_main_process:
        return
    best = AutoModelForSequenceClassification.from_pretrained(result.best_dir).to(accelerator.device)
    scores = {"validation": result.best_metrics}
    if "test" in splits:
        scores["test"] = score(best, "test")
    name = "with RSA" if is_patched(best) else "plain"
    table = [["model", "split", "accuracy", "majority class", "F1", "MCC", "functions"]]
    for split, figures in scores.items():
        shares = (f"{figures[key]:.2%}" for key in ("accuracy", "majority_accuracy"))
        numbers = (f"{figures[key]:.4f}" for key in ("f1", "mcc"))
        table.append([name, split, *shares, *numbers, f"{figures['num_examples']:,}"])
    report_results(config, result, scores, table, best)


def evaluate(name: str, split: str, arguments: Sequence[str]) -> dict[str, float]:
    """Score a saved defect detector.

    Args:
        name: folder of the checkpoint, with its tokenizer, or its name on the Hub.
        split: "validation" or "test".
        arguments: a YAML file and `--key value` settings, of which those of the data and the batch size count.

    Returns:
        What `compute_metrics` returns.

    Raises:
        OSError, ValueError: a file, a name or a setting does not fit.
    """
    config = read_run_config(arguments, DefectDataConfig)
    tokenizer = AutoTokenizer.from_pretrained(locate(name))
    model = AutoModelForSequenceClassification.from_pretrained(locate(name))
    splits = load_defect_data(config.data)
    if split not in splits:
        raise ValueError(f"the data has no split {split!r}, only {', '.join(splits)}.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    require_tokens_known(model, len(tokenizer))
    _require_room(model, tokenizer, config.data.max_length)
    return _scorer({split: splits[split]}, tokenizer, config.data, config.training.eval_batch_size)(model, split)


def _require_room(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", sys.maxsize))
    if max_length > longest:
        raise ValueError(f"data.max_length={max_length}: this model takes at most {longest} tokens.")


def _inputs(rows: datasets.Dataset) -> list[dict[str, Any]]:
    return list(rows.remove_columns("example_id"))


def _scorer(
    splits: Mapping[str, Sequence[Example]],
    tokenizer: PreTrainedTokenizerBase,
    config: DefectDataConfig,
    batch_size: int,
) -> Callable[[PreTrainedModel, str], dict[str, float]]:
    """What scores a model on one of the splits."""
    rows = {
        split: task.tokenize(examples, tokenizer, config) for split, examples in splits.items() if split != "train"
    }
    collate = task.collator(tokenizer)

    def score(model: PreTrainedModel, split: str) -> dict[str, float]:
        logits = predict_logits(model, _inputs(rows[split]), collate, batch_size)
        return task.compute_metrics(logits, rows[split]["labels"], rows[split]["example_id"])

    return score
