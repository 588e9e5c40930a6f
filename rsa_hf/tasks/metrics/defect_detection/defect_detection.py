"""`evaluate` module of defect detection: accuracy, F1, Matthews correlation and the majority baseline."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """
Scores of a binary classifier, of which 1 is the positive (defective) class. The accuracy of always answering
with the commonest of the references comes with them, as accuracy says nothing without it.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (list of int): the predicted classes, 0 or 1.
    references (list of int): the true classes, 0 or 1.
Returns:
    accuracy: share of right predictions.
    f1: harmonic mean of precision and recall of class 1; 0 where neither predictions nor references hold a 1.
    mcc: Matthews correlation, from -1 to 1; 0 where predictions or references hold one class only.
    majority_accuracy: share of the commonest class among the references.
Raises:
    ValueError: there is nothing to score, or a value other than 0 and 1.
Examples:
    >>> metric = evaluate.load("rsa_hf/metrics/defect_detection")
    >>> metric.compute(predictions=[0, 1, 1, 1], references=[0, 1, 1, 0])["accuracy"]
    0.75
"""


class DefectDetection(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Accuracy, F1, MCC and majority-class accuracy of a binary classifier."""

    def _info(self) -> Any:
        # As int64, evaluate would round a probability down to class 0 in silence; as float64 it gets refused.
        classes = {name: datasets.Value("float64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(classes),
            format="numpy",
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        if len(references) == 0:
            raise ValueError("predictions and references are empty; give at least one of each")
        for name, values in (("predictions", predictions), ("references", references)):
            wrong = values[(values != 0) & (values != 1)]
            if len(wrong) > 0:
                raise ValueError(
                    f"{name} hold {wrong[0]:g}; allowed are the classes 0 and 1, so turn scores into classes first"
                )

        # Counts as Python numbers: the product of four of them would overflow int64 at some 60,000 examples.
        true_positive = int(np.sum((predictions == 1) & (references == 1)))
        true_negative = int(np.sum((predictions == 0) & (references == 0)))
        false_positive = int(np.sum((predictions == 1) & (references == 0)))
        false_negative = int(np.sum((predictions == 0) & (references == 1)))
        total = len(references)

        f1_denominator = 2 * true_positive + false_positive + false_negative
        mcc_denominator = (
            (true_positive + false_positive)
            * (true_positive + false_negative)
            * (true_negative + false_positive)
            * (true_negative + false_negative)
        ) ** 0.5
        covariance = true_positive * true_negative - false_positive * false_negative
        positives = true_positive + false_negative
        return {
            "accuracy": (true_positive + true_negative) / total,
            "f1": 2 * true_positive / f1_denominator if f1_denominator else 0.0,
            "mcc": covariance / mcc_denominator if mcc_denominator else 0.0,
            "majority_accuracy": max(positives, total - positives) / total,
        }
