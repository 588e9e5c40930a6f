"""The scores of defect detection, by scikit-learn, and the threshold of a classifier."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, matthews_corrcoef, roc_auc_score
from transformers import EvalPrediction


def classification_scores(predictions: Any, references: Any, prediction_scores: Any = None) -> dict[str, float]:
    """Scores of predicted classes; 1 is the positive (defective) class.

    Args:
        predictions: the predicted classes [N], 0 or 1.
        references: the true classes [N], 0 or 1.
        prediction_scores: scores of class 1 [N], such as probabilities or differences of logits; None: not known.

    Returns:
        `accuracy`; `f1` of class 1 and `mcc`, Matthews correlation, 0 where they are not defined; and
        `majority_accuracy`, that of always predicting the most frequent class. With `prediction_scores`, `roc_auc` and
        `average_precision`, the areas under the ROC and the precision-recall curve, NaN if references hold one class.
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
        example_ids: integers [N], the function that each row belongs to, over whose rows logits are averaged; None:
            each row is a function.
        threshold: the probability of class 1 above which a function counts as defective, from `choose_threshold` on
            other functions. None: 0.5 alone.

    Returns:
        The `classification_scores` at 0.5, the `positive_share`, and the number of functions, `num_examples`. With a
        `threshold`, that and `accuracy_at_threshold`, `f1_at_threshold` and `mcc_at_threshold`.

    Raises:
        ValueError: shapes do not match, logits are not finite, or rows of one function have different labels.
    """
    functions, targets = by_function(logits, labels, example_ids)
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
    Arguments and errors are those of `compute_metrics`.

    Returns:
        A probability of class 1. Functions above it count as defective. 0.5 if no threshold has a positive MCC.
    """
    functions, targets = by_function(logits, labels, example_ids)
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
    return torch.from_numpy(logits[:, 1] - logits[:, 0]).sigmoid().numpy()


def by_function(logits: Any, labels: Any, example_ids: Any) -> tuple[Any, Any]:
    """The logits [N, 2] and labels [N] of functions: as for `compute_metrics`, averaged over the rows of each."""
    scores = torch.as_tensor(logits, dtype=torch.float64, device="cpu").detach().numpy()
    targets = torch.as_tensor(labels, device="cpu").detach().numpy()
    if scores.shape != (*targets.shape, 2):
        shapes = f"logits have shape {list(scores.shape)} and labels {list(targets.shape)}"
        raise ValueError(f"{shapes}; needed are [N, 2] and [N], as a classifier with num_labels=2 returns.")
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
    """`compute_metrics` for `transformers.Trainer`: of logits, or a tuple that begins with them, and labels.

    For `long_functions="chunk"`, pass `label_names=["labels", "example_id"]` to `TrainingArguments`. The Trainer then
    passes on the example ids, and the chunks of a function are scored together.
    """
    return compute_metrics(*parts_of(eval_prediction))


def parts_of(predictions: Any) -> tuple[Any, Any, Any]:
    """Logits, labels and example ids of an `EvalPrediction`, or of what `Trainer.predict` returns."""
    logits, labels = predictions.predictions, predictions.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    labels, example_ids = labels if isinstance(labels, tuple) else (labels, None)
    return logits, labels, example_ids
