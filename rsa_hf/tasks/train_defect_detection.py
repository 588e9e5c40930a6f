"""Train and evaluate a defect detector: `rsa-hf train defect`, `rsa-hf evaluate defect`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
from accelerate.utils import set_seed
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rsa_hf.patching import is_patched
from rsa_hf.tasks.defect_audit import audit, format_audit
from rsa_hf.tasks.defect_data import DefectDataConfig, Example, load_defect_data
from rsa_hf.tasks.defect_detection import class_weights, compute_metrics, tokenize
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.run import (
    load_model,
    make_accelerator,
    predict_logits,
    report_results,
    require_tokens_known,
    train,
)
from rsa_hf.utils.files import sole_writer, write_text
from rsa_hf.utils.locate import locate

__all__ = ["evaluate", "main"]


def main(arguments: Sequence[str]) -> None:
    """Train a defect detector, evaluate the best checkpoint, and write all results to the output folder.

    Args:
        arguments: A YAML file and `--key value` settings, as for `read_run_config`.

    Raises:
        OSError, ValueError: A file, a name or a setting is invalid.
        TrainingDivergedError: The loss is NaN or infinite.
    """
    config = read_run_config(arguments, DefectDataConfig)
    training, output = config.training, Path(config.training.output_dir)
    accelerator = make_accelerator(training.mixed_precision)
    set_seed(training.seed)
    source = config.model.tokenizer or config.model.name_or_path
    if source is None:
        raise ValueError("model.tokenizer=None: a model from scratch needs one; name one on the Hub, or a folder.")
    with accelerator.main_process_first():  # the other processes then find its downloads in the cache
        tokenizer = AutoTokenizer.from_pretrained(locate(source))
        model = load_model(AutoModelForSequenceClassification, config.model, config.rsa, num_labels=2)
        splits = load_defect_data(config.data)
    _fit_to_each_other(model, tokenizer, config.data)
    if "validation" not in splits:
        raise ValueError("the data has no validation split to choose the best model by. Add one.")
    if accelerator.is_main_process:
        report = audit(splits, tokenizer, config.data.max_length)
        print(format_audit(report))
        with sole_writer(output):
            write_text(output / "audit.json", json.dumps(report, indent=2) + "\n")
    evaluators = {
        split: _evaluator(splits[split], tokenizer, config.data, training.eval_batch_size)
        for split in splits
        if split != "train"
    }
    labels = [example.target for example in splits["train"]]
    result = train(
        model,
        _inputs(tokenize(splits["train"], tokenizer, config.data)),
        DataCollatorWithPadding(tokenizer),
        evaluators["validation"],
        training,
        best_metric="accuracy",
        greater_is_better=True,
        class_weights=class_weights(labels).tolist() if training.class_weights else None,
        tokenizer=tokenizer,
        settings=config.to_dict(),
        accelerator=accelerator,
    )
    if not accelerator.is_main_process:
        return
    best = AutoModelForSequenceClassification.from_pretrained(result.best_dir).to(accelerator.device)
    scores = {"validation": result.best_metrics}
    if "test" in evaluators:
        scores["test"] = evaluators["test"](best)
    name = "with RSA" if is_patched(best) else "plain"
    table = [["model", "split", "accuracy", "majority class", "F1", "MCC", "functions"]]
    for split, figures in scores.items():
        shares = (f"{figures[key]:.2%}" for key in ("accuracy", "majority_accuracy"))
        numbers = (f"{figures[key]:.4f}" for key in ("f1", "mcc"))
        table.append([name, split, *shares, *numbers, f"{figures['num_examples']:,}"])
    report_results(config, result, scores, table, best)


def evaluate(name: str, split: str, arguments: Sequence[str]) -> dict[str, float]:
    """Evaluate a saved defect detector.

    Args:
        name: Folder of a checkpoint with its tokenizer, or its name on the Hub.
        split: "validation" or "test".
        arguments: A YAML file and `--key value` settings; the data and the batch size are used.

    Returns:
        The result of `compute_metrics`.

    Raises:
        OSError, ValueError: A file, a name or a setting is invalid.
    """
    config = read_run_config(arguments, DefectDataConfig)
    tokenizer = AutoTokenizer.from_pretrained(locate(name))
    model = AutoModelForSequenceClassification.from_pretrained(locate(name))
    splits = load_defect_data(config.data)
    if split not in splits:
        raise ValueError(f"the data has no split {split!r}, only {', '.join(splits)}.")
    _fit_to_each_other(model, tokenizer, config.data)
    return _evaluator(splits[split], tokenizer, config.data, config.training.eval_batch_size)(model)


def _fit_to_each_other(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DefectDataConfig) -> None:
    """Set the padding token of both, and check that the model has the tokenizer's tokens and enough positions."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    require_tokens_known(model, len(tokenizer))
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", sys.maxsize))
    if data.max_length > longest:
        raise ValueError(f"data.max_length={data.max_length}: this model takes at most {longest} tokens.")


def _inputs(rows: datasets.Dataset) -> list[dict[str, Any]]:
    return list(rows.remove_columns("example_id"))


def _evaluator(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DefectDataConfig, batch_size: int
) -> Callable[[PreTrainedModel], dict[str, float]]:
    """A function that evaluates a model on the examples."""
    rows = tokenize(examples, tokenizer, config)

    def score(model: PreTrainedModel) -> dict[str, float]:
        logits = predict_logits(model, _inputs(rows), DataCollatorWithPadding(tokenizer), batch_size)
        return compute_metrics(logits, rows["labels"], rows["example_id"])

    return score
