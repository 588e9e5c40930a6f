"""The scores of defect detection, computed with scikit-learn, and the threshold of a classifier."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn import metrics
from transformers import EvalPrediction

from rsa_hf.tasks.python_defects import Example

RESAMPLES = 1000  # of a bootstrap interval
MAX_FPR = 0.005  # of VD-S


def classification_scores(predictions: Any, references: Any, prediction_scores: Any = None) -> dict[str, float]:
    """Scores of predicted classes; 1 is the positive (defective) class.

    Args:
        predictions: the predicted classes [N], 0 or 1.
        references: the true classes [N], 0 or 1.
        prediction_scores: scores of class 1 [N], such as probabilities or differences of logits; None: not known.

    Returns:
        `accuracy`; `f1`, `precision` and `recall` of class 1, and `mcc`, Matthews correlation, 0 where they are not
        defined; `predicted_positive_share`; and `majority_accuracy`, the accuracy of always predicting the most
        frequent class. With `prediction_scores`, also `roc_auc` and `average_precision`, the areas under the ROC and
        the precision-recall curve, and `vd_score`, all NaN if references hold only one class.
    """
    positives = int(np.sum(references))
    of_class_1 = {"f1": metrics.f1_score, "precision": metrics.precision_score, "recall": metrics.recall_score}
    result = {
        "accuracy": float(metrics.accuracy_score(references, predictions)),
        **{name: float(score(references, predictions, zero_division=0)) for name, score in of_class_1.items()},
        "mcc": float(metrics.matthews_corrcoef(references, predictions)),
        "predicted_positive_share": float(np.mean(predictions)),
        "majority_accuracy": max(positives, len(references) - positives) / len(references),
    }
    if prediction_scores is not None:
        for name, score in (
            ("roc_auc", metrics.roc_auc_score),
            ("average_precision", metrics.average_precision_score),
        ):
            both = 0 < positives < len(references)
            result[name] = float(score(references, prediction_scores)) if both else math.nan
        result["vd_score"] = vd_score(prediction_scores, references)
    return result


def vd_score(scores: Any, labels: Any, max_fpr: float = MAX_FPR) -> float:
    """The vulnerability detection score (VD-S): the share of defective functions that are missed, at few false alarms.

    It is the lowest false-negative rate of all thresholds with a false-positive rate of at most `max_fpr` (Ding et
    al., Vulnerability Detection with Code Language Models: How Far Are We?, ICSE 2025, arXiv 2403.18624). Functions
    with equal scores are on the same side of every threshold.

    Args:
        scores: scores of class 1 [N], higher for functions that are more likely defective.
        labels: the true classes [N], 0 or 1.
        max_fpr: the largest share of clean functions that may be called defective.

    Returns:
        A share, lower is better; NaN if labels hold one class.

    Raises:
        ValueError: `max_fpr` is not a share, or scores are not finite.
    """
    if not 0 <= max_fpr <= 1:
        raise ValueError(f"max_fpr={max_fpr}: a share from 0 to 1 is needed.")
    if len(set(np.asarray(labels).tolist())) < 2:
        return math.nan
    false_alarms, found, _ = metrics.roc_curve(labels, scores, pos_label=1, drop_intermediate=False)
    return float(1 - found[false_alarms <= max_fpr].max())


def pair_rates(vulnerable: Any, fixed: Any) -> dict[str, float]:
    """How pairs of a defective function and its fixed twin are told apart.

    Args:
        vulnerable: the predicted classes [N] of the defective members, 0 or 1.
        fixed: those of the clean members [N], in the same order.

    Returns:
        Shares that sum to 1: `pair_correct` (P-C of Ding et al., as for `vd_score`), both right; `pair_vulnerable`
        (P-V), both called defective; `pair_benign` (P-B), both called clean; `pair_reversed` (P-R), both wrong.

    Raises:
        ValueError: the numbers differ or are 0, or a class is neither 0 nor 1.
    """
    first, second = np.asarray(vulnerable), np.asarray(fixed)
    if first.shape != second.shape or first.ndim != 1 or first.size == 0:
        raise ValueError(
            f"predicted classes of shapes {first.shape} and {second.shape}; needed are [N] and [N], N ≥ 1."
        )
    if not set(np.unique([first, second]).tolist()) <= {0, 1}:
        raise ValueError(f"predicted classes {np.unique([first, second])[:5].tolist()}; needed are 0 and 1.")
    cases = {"correct": (1, 0), "vulnerable": (1, 1), "benign": (0, 0), "reversed": (0, 1)}
    return {f"pair_{name}": float(np.mean((first == a) & (second == b))) for name, (a, b) in cases.items()}


def pair_rates_of(examples: Sequence[Example], predictions: Any) -> dict[str, float]:
    """The `pair_rates` of the complete pairs among functions, from predicted classes [N]; empty without such pairs."""
    pairs: dict[int, dict[int, int]] = {}
    for example, predicted in zip(examples, predictions, strict=True):
        if example.pair is not None:
            pairs.setdefault(example.pair, {})[example.target] = int(predicted)
    whole = [members for members in pairs.values() if len(members) == 2]
    return pair_rates(*zip(*((members[1], members[0]) for members in whole), strict=True)) if whole else {}


def bootstrap_intervals(
    logits: Any, labels: Any, example_ids: Any = None, threshold: float = 0.5, seed: int = 0
) -> dict[str, list[float]]:
    """95 % bootstrap intervals of a classifier's scores: functions are drawn again, with replacement (Efron, 1979).

    Args:
        logits: as for `compute_metrics`, as are `labels` and `example_ids`.
        labels: see `logits`.
        example_ids: see `logits`.
        threshold: the probability above which functions count as defective.
        seed: the seed of the 1,000 samples.

    Returns:
        The 2.5th and 97.5th percentile of `accuracy`, `f1`, `precision`, `recall`, `mcc`, `roc_auc`,
        `average_precision` and `vd_score`. Samples in which a score is not defined are left out.

    Raises:
        ValueError: as `compute_metrics`.
    """
    functions, targets = by_function(logits, labels, example_ids)
    odds, called = functions[:, 1] - functions[:, 0], probabilities(functions) > threshold
    order = np.argsort(-odds, kind="stable")
    last_of_equals = np.append(np.diff(odds[order]) < 0, True)
    random, size = np.random.default_rng(seed), len(targets)
    values = [
        _scores_of_sample(
            targets[order], called[order], last_of_equals, random.multinomial(size, np.full(size, 1 / size))
        )
        for _ in range(RESAMPLES)
    ]
    intervals = {}
    for name in values[0]:
        defined = [each[name] for each in values if math.isfinite(each[name])] or [math.nan]
        intervals[name] = np.percentile(defined, (2.5, 97.5)).tolist()
    return intervals


def _scores_of_sample(targets: Any, called: Any, last_of_equals: Any, weights: Any) -> dict[str, float]:
    """Some of the scores of functions, in falling order of score and weighted by counts; faster than scikit-learn's.

    All arguments are [N]: the true classes, the predicted ones, whether the next function's score differs, the counts.
    """
    num, positives, found, right = weights.sum(), weights @ targets, weights @ called, weights @ (targets * called)
    clean, wrong = num - positives, found - right
    told_apart = positives if clean else 0  # without both classes areas are not defined
    hits = np.append(0, np.cumsum(weights * targets)[last_of_equals])
    alarms = np.append(0, np.cumsum(weights * (1 - targets))[last_of_equals])
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "accuracy": (num - wrong - (positives - right)) / num,
            "f1": 2 * right / (found + positives),
            "precision": right / found,
            "recall": right / positives,
            "mcc": (right * num - found * positives) / np.sqrt(1.0 * found * positives * (num - found) * clean),
            "roc_auc": np.diff(alarms) @ (hits[1:] + hits[:-1]) / (2 * positives * clean),
            "average_precision": np.nansum(np.diff(hits) * hits[1:] / (hits + alarms)[1:]) / told_apart,
            "vd_score": 1 - hits[alarms <= MAX_FPR * clean].max() / told_apart,
        }


def compute_metrics(
    logits: Any, labels: Any, example_ids: Any = None, threshold: float | None = None
) -> dict[str, float]:
    """Score a classifier.

    Args:
        logits: array or tensor [N, 2], the scores of clean and defective for each row.
        labels: integers [N], 0 or 1.
        example_ids: integers [N], the function that each row belongs to; logits are averaged over its rows. None: each
            row is a function.
        threshold: the probability of class 1 above which a function counts as defective, from `choose_threshold` on
            other functions. None: only 0.5.

    Returns:
        The `classification_scores` at 0.5, the `positive_share`, and the number of functions, `num_examples`. With a
        `threshold`, also the threshold and the scores of classes at it: `accuracy_at_threshold` and so on.

    Raises:
        ValueError: shapes do not match, logits are not finite, or rows of one function have different labels.
    """
    functions, targets = by_function(logits, labels, example_ids)
    result = classification_scores(functions.argmax(axis=1), targets, functions[:, 1] - functions[:, 0])
    result |= {"positive_share": float(targets.mean()), "num_examples": len(targets)}
    if threshold is not None:
        at = classification_scores((probabilities(functions) > threshold).astype(int), targets)
        del at["majority_accuracy"]
        result |= {"threshold": threshold, **{f"{name}_at_threshold": score for name, score in at.items()}}
    return result


def choose_threshold(logits: Any, labels: Any, example_ids: Any = None) -> float:
    """Choose the threshold with the highest Matthews correlation (MCC); do it on validation data.

    MCC is used rather than F1: if scores barely tell the classes apart, F1 is highest when every function counts as
    defective (Lipton et al., Optimal Thresholding of Classifiers to Maximize F1 Measure, 2014), and MCC is then 0.
    Arguments and errors are those of `compute_metrics`.

    Returns:
        A probability of class 1. Functions above it count as defective. 0.5 if no threshold has a positive MCC.
    """
    functions, targets = by_function(logits, labels, example_ids)
    found = probabilities(functions)
    order = found.argsort()
    found, targets = found[order], targets[order]
    cuts = (found[:-1] + found[1:]) / 2
    num, positives = len(targets), int(targets.sum())
    called = num - np.arange(1, num)  # functions above each cut
    right = positives - targets.cumsum()[:-1]  # defective ones among them
    between = (found[:-1] <= cuts) & (cuts < found[1:])
    # MCC times √(positives · (num − positives)), which is the same for all cuts.
    mcc = between * (right * num - called * positives) / np.sqrt(called * (num - called))
    return float(cuts[mcc.argmax()]) if (mcc > 0).any() else 0.5


def probabilities(logits: Any) -> Any:
    """The probabilities of class 1 [N] for logits [N, 2] in NumPy; equal logits give equal probabilities."""
    odds, places = np.unique(logits[:, 1] - logits[:, 0], return_inverse=True)  # sigmoid rounds depending on the place
    return torch.from_numpy(odds).sigmoid().numpy()[places]


def by_function(logits: Any, labels: Any, example_ids: Any) -> tuple[Any, Any]:
    """The logits [N, 2], averaged over each function's rows, and labels [N]; arguments as for `compute_metrics`."""
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
    """`compute_metrics` for `transformers.Trainer`: takes logits, or a tuple that begins with them, and labels.

    For `long_functions="chunk"`, pass `label_names=["labels", "example_id"]` to `TrainingArguments`. The Trainer then
    passes on the example ids, and the chunks of a function are scored together.
    """
    return compute_metrics(*functions_of(eval_prediction))


def functions_of(predictions: Any) -> tuple[Any, Any]:
    """`by_function` of an `EvalPrediction`, or of what `Trainer.predict` returns."""
    logits, labels = predictions.predictions, predictions.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    labels, example_ids = labels if isinstance(labels, tuple) else (labels, None)
    return by_function(logits, labels, example_ids)
