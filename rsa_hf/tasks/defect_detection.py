"""Defect detection, the classification of functions as clean (0) or defective (1): inputs, scores and training.

The commands are `rsa-hf train defect` and `rsa-hf evaluate defect`.

A function too long for the model is truncated, or cut into overlapping chunks. In training, each chunk is an example
with the function's label. In evaluation, `compute_metrics` averages the logits over a function's chunks, if it is
given the example ids.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import set_seed
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, matthews_corrcoef, roc_auc_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rsa_hf.patching import is_patched
from rsa_hf.tasks.defect_data import DefectDataConfig, Example, audit, format_audit, in_batches, load_defect_data
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.calibrated import patch_calibrated
from rsa_hf.training.run import (
    card_facts,
    load_model,
    make_accelerator,
    predict_logits,
    report_results,
    require_tokens_known,
    train,
)
from rsa_hf.utils.files import sole_writer, write_text
from rsa_hf.utils.locate import locate

__all__ = [
    "choose_threshold",
    "class_weights",
    "classification_scores",
    "compute_metrics",
    "evaluate",
    "main",
    "plain_model_and_rows",
    "tokenize",
    "trainer_metrics",
]


def main(arguments: Sequence[str]) -> None:
    """Train a defect detector, evaluate the best checkpoint, and write all results to the output folder.

    Args:
        arguments: a YAML file and `--key value` settings, as for `read_run_config`.
    """
    config = read_run_config(arguments, DefectDataConfig)
    training, output = config.training, Path(config.training.output_dir)
    accelerator = make_accelerator(training)
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
    predictors = {
        split: _predictor(examples, tokenizer, config.data, training.eval_batch_size)
        for split, examples in splits.items()
        if split != "train"
    }
    labels = [example.target for example in splits["train"]]
    rows = list(tokenize(splits["train"], tokenizer, config.data).remove_columns("example_id"))
    collate = DataCollatorWithPadding(tokenizer)
    if config.calibrate is not None:
        model = patch_calibrated(model, rows, collate, config, accelerator)
    result = train(
        model,
        rows,
        collate,
        lambda model: compute_metrics(*predictors["validation"](model)),
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
    predictions = {split: predict(best) for split, predict in predictors.items()}
    threshold = choose_threshold(*predictions["validation"])
    scores = {split: compute_metrics(*each, threshold) for split, each in predictions.items()}
    if "test" in predictions:
        text = _codexglue_predictions(splits["test"], *predictions["test"])
        with sole_writer(output):
            write_text(output / "predictions.txt", text)
    report_results(config, result, scores, _table("with RSA" if is_patched(best) else "plain", scores), best)


def plain_model_and_rows(arguments: Sequence[str]) -> tuple[PreTrainedModel, Any, Any]:
    """The model of a run without RSA heads, its training data, and what makes a batch of rows.

    Args:
        arguments: a YAML file and `--key value` settings, as for `read_run_config`.
    """
    config = read_run_config(arguments, DefectDataConfig)
    set_seed(config.training.seed)
    tokenizer = AutoTokenizer.from_pretrained(locate(str(config.model.tokenizer or config.model.name_or_path)))
    model = load_model(AutoModelForSequenceClassification, config.model, None, num_labels=2)
    _fit_to_each_other(model, tokenizer, config.data)
    examples = load_defect_data(config.data)["train"]
    rows = list(tokenize(examples, tokenizer, config.data).remove_columns("example_id"))
    return model, rows, DataCollatorWithPadding(tokenizer)


def _table(name: str, scores: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """The scores of each split, at the threshold 0.5 and at the chosen one."""
    table = [
        ["model", "split", "threshold", "accuracy", "majority class", "F1", "MCC", "ROC AUC", "AP", "functions"],
    ]
    for split, figures in scores.items():
        for threshold, at in ((0.5, ""), (figures["threshold"], "_at_threshold")):
            shares = (f"{figures[key]:.2%}" for key in (f"accuracy{at}", "majority_accuracy"))
            numbers = (f"{figures[key]:.4f}" for key in (f"f1{at}", f"mcc{at}", "roc_auc", "average_precision"))
            table.append([name, split, f"{threshold:.4g}", *shares, *numbers, f"{figures['num_examples']:,}"])
    return table


def _codexglue_predictions(examples: Sequence[Example], logits: Any, labels: Any, example_ids: Any) -> str:
    """The predicted classes as CodeXGLUE's evaluator reads them: lines of a function's `idx`, a tab and 0 or 1.

    A function without `idx` has its position, from 0.
    """
    functions, _ = _by_function(logits, labels, example_ids)
    classes = zip(examples, functions.argmax(axis=1), strict=True)
    return "".join(f"{i if each.idx is None else each.idx}\t{label}\n" for i, (each, label) in enumerate(classes))


def evaluate(name: str, split: str, arguments: Sequence[str], threshold: float | None = None) -> dict[str, float]:
    """Evaluate a saved defect detector.

    Args:
        name: folder of a checkpoint with its tokenizer, or its name on the Hub.
        split: "validation" or "test".
        arguments: as for `main`; the data and the batch size are used.
        threshold: as for `compute_metrics`. None: the one that the run of this checkpoint chose, if the folder has a
            model card, or is `best` of a run.
    """
    config = read_run_config(arguments, DefectDataConfig)
    tokenizer = AutoTokenizer.from_pretrained(locate(name))
    model = AutoModelForSequenceClassification.from_pretrained(locate(name))
    splits = load_defect_data(config.data)
    if split not in splits:
        raise ValueError(f"the data has no split {split!r}, only {', '.join(splits)}.")
    _fit_to_each_other(model, tokenizer, config.data)
    predict = _predictor(splits[split], tokenizer, config.data, config.training.eval_batch_size)
    return compute_metrics(*predict(model), _threshold_of(Path(name)) if threshold is None else threshold)


def _threshold_of(folder: Path) -> float | None:
    """The threshold that a run chose: in the `results.json` beside its best model."""
    scores, results = None, folder.resolve().parent / "results.json"
    if folder.resolve().name == "best" and results.is_file():
        with suppress(ValueError):  # of something else
            scores = card_facts(results)["scores"]
    threshold: float | None = (scores or {}).get("validation", {}).get("threshold")
    return threshold


def _fit_to_each_other(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DefectDataConfig) -> None:
    """Set the padding token of both, and check that the model has the tokenizer's tokens and enough positions."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    require_tokens_known(model, len(tokenizer))
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", sys.maxsize))
    if data.max_length > longest:
        raise ValueError(f"data.max_length={data.max_length}: this model takes at most {longest} tokens.")


def _predictor(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DefectDataConfig, batch_size: int
) -> Callable[[PreTrainedModel], tuple[torch.Tensor, Any, Any]]:
    """A function that returns a model's logits on the examples, their labels and example ids."""
    rows = tokenize(examples, tokenizer, config)

    def predict(model: PreTrainedModel) -> tuple[torch.Tensor, Any, Any]:
        inputs = list(rows.remove_columns("example_id"))
        logits = predict_logits(model, inputs, DataCollatorWithPadding(tokenizer), batch_size)
        return logits, rows["labels"], rows["example_id"]

    return predict


# --- inputs ---------------------------------------------------------------------------------------------------------


def tokenize(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DefectDataConfig
) -> datasets.Dataset:
    """Turn functions into model inputs of at most `config.max_length` tokens.

    Args:
        examples: the functions of one split.
        tokenizer: the model's tokenizer; a fast one for chunks.
        config: provides `max_length`, `long_functions` and `chunk_overlap`.

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
            f"max_length={config.max_length}: leaves room for {room} tokens of text"
            + (f", chunk_overlap is {overlap}; choose it from 0 to below the room." if chunk else "; choose more.")
        )
    windows = {"return_overflowing_tokens": True, "stride": overlap} if chunk else {}
    rows: dict[str, list[Any]] = {"input_ids": [], "attention_mask": [], "labels": [], "example_id": []}
    first = 0  # index of the first function of a batch
    for texts in in_batches(examples):
        encoded = tokenizer(
            texts, truncation=True, max_length=config.max_length, return_attention_mask=True, **windows
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


# --- scores ---------------------------------------------------------------------------------------------------------


def classification_scores(predictions: Any, references: Any, prediction_scores: Any = None) -> dict[str, float]:
    """Scores of predicted classes; 1 is the positive (defective) class.

    Args:
        predictions: the predicted classes [N], 0 or 1.
        references: the true classes [N], 0 or 1.
        prediction_scores: scores of class 1 [N], such as probabilities or differences of logits; None: not known.

    Returns:
        `accuracy`; `f1` of class 1, 0 if neither predictions nor references hold a 1; `mcc`, Matthews correlation,
        from -1 to 1, 0 if predictions or references hold one class only; and `majority_accuracy`, the accuracy of
        always predicting the most frequent class, without which an accuracy says little. With `prediction_scores`,
        `roc_auc` and `average_precision` too, which depend on no threshold: the area under the ROC curve (0.5 for
        random scores) and that under the precision-recall curve (for random scores, the share of class 1). Both are
        NaN if references hold one class only.
    """
    positives = int(np.sum(references))
    result = {
        "accuracy": float(accuracy_score(references, predictions)),
        "f1": float(f1_score(references, predictions, zero_division=0)),
        "mcc": float(matthews_corrcoef(references, predictions)),
        "majority_accuracy": max(positives, len(references) - positives) / len(references),
    }
    if prediction_scores is not None:
        for name, score in (("roc_auc", roc_auc_score), ("average_precision", average_precision_score)):
            both = 0 < positives < len(references)
            result[name] = float(score(references, prediction_scores)) if both else math.nan
    return result


def compute_metrics(
    logits: Any, labels: Any, example_ids: Any = None, threshold: float | None = None
) -> dict[str, float]:
    """Score a classifier.

    Args:
        logits: array or tensor [N, 2], the scores of clean and defective for each row.
        labels: integers [N], 0 or 1.
        example_ids: integers [N], the function that each row belongs to; its logits are averaged over its rows; None:
            each row is a function.
        threshold: the probability of class 1 above which a function counts as defective, from `choose_threshold` on
            other functions. None: 0.5 alone.

    Returns:
        The `classification_scores` at 0.5, the `positive_share`, and the number of functions, `num_examples`. With a
        `threshold`, that and `accuracy_at_threshold`, `f1_at_threshold` and `mcc_at_threshold`.

    Raises:
        ValueError: shapes do not match, logits are not finite, or rows of one function have different labels.
    """
    functions, targets = _by_function(logits, labels, example_ids)
    result = classification_scores(functions.argmax(axis=1), targets, functions[:, 1] - functions[:, 0])
    result |= {"positive_share": float(targets.mean()), "num_examples": len(targets)}
    if threshold is not None:
        at = classification_scores((_probabilities(functions) > threshold).astype(int), targets)
        result |= {"threshold": threshold, **{f"{name}_at_threshold": at[name] for name in ("accuracy", "f1", "mcc")}}
    return result


def choose_threshold(logits: Any, labels: Any, example_ids: Any = None) -> float:
    """Choose the threshold with the highest Matthews correlation (MCC); do it on validation data.

    MCC rather than F1: where scores tell the classes apart but little, F1 is highest if every function counts as
    defective (Lipton et al., Optimal Thresholding of Classifiers to Maximize F1 Measure, 2014), and MCC is then 0.

    Args:
        logits: as for `compute_metrics`.
        labels: as for `compute_metrics`.
        example_ids: as for `compute_metrics`.

    Returns:
        A probability of class 1. Functions above it count as defective. 0.5 if no threshold has a positive MCC.

    Raises:
        ValueError: as for `compute_metrics`.
    """
    functions, targets = _by_function(logits, labels, example_ids)
    probabilities = _probabilities(functions)
    order = probabilities.argsort()
    probabilities, targets = probabilities[order], targets[order]
    cuts = (probabilities[:-1] + probabilities[1:]) / 2
    num, positives = len(targets), int(targets.sum())
    called = num - np.arange(1, num)  # functions above each cut
    right = positives - targets.cumsum()[:-1]  # defective ones among them
    between = (probabilities[:-1] <= cuts) & (cuts < probabilities[1:])
    # MCC times √(positives · (num − positives)), which is the same for all cuts.
    mcc = between * (right * num - called * positives) / np.sqrt(called * (num - called))
    return float(cuts[mcc.argmax()]) if (mcc > 0).any() else 0.5


def _probabilities(logits: Any) -> Any:
    """The probabilities [N] of class 1."""
    return torch.from_numpy(logits[:, 1] - logits[:, 0]).sigmoid().numpy()


def _by_function(logits: Any, labels: Any, example_ids: Any) -> tuple[Any, Any]:
    """The logits [N, 2] and labels [N] of functions: as for `compute_metrics`, averaged over the rows of each."""
    scores = torch.as_tensor(logits, dtype=torch.float64, device="cpu").detach().numpy()
    targets = torch.as_tensor(labels, device="cpu").detach().numpy()
    if scores.shape != (*targets.shape, 2):
        raise ValueError(
            f"logits have shape {list(scores.shape)} and labels {list(targets.shape)}; needed are [N, 2] and [N], as "
            "a sequence classifier with num_labels=2 returns."
        )
    if not np.isfinite(scores).all():
        raise ValueError("logits hold NaN or infinite values, so training has diverged. Lower the learning rate.")
    if example_ids is None:
        return scores, targets
    _, first, owners = np.unique(torch.as_tensor(example_ids, device="cpu"), return_index=True, return_inverse=True)
    if (targets != targets[first][owners]).any():
        raise ValueError("example_ids do not match the labels: each function has one label, in one split.")
    sums = np.stack([np.bincount(owners, column) for column in scores.T], axis=1)
    return sums / np.bincount(owners)[:, None], targets[first]


def trainer_metrics(eval_prediction: EvalPrediction) -> dict[str, float]:
    """Score a classifier; the `compute_metrics` of `transformers.Trainer`.

    For `long_functions="chunk"`, pass `label_names=["labels", "example_id"]` to `TrainingArguments`. The Trainer then
    passes on the example ids, and the chunks of a function are scored together.

    Args:
        eval_prediction: logits [N, 2], or a tuple that begins with them, and labels [N], or labels and example ids.

    Returns:
        The result of `compute_metrics`.
    """
    logits: Any = eval_prediction.predictions
    labels: Any = eval_prediction.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    labels, example_ids = labels if isinstance(labels, tuple) else (labels, None)
    return compute_metrics(logits, labels, example_ids)
