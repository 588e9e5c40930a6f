"""`evaluate` module of defect detection: accuracy, F1, Matthews correlation and the majority baseline."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_DESCRIPTION = """
Scores of a binary classifier; 1 is the positive (defective) class. They include the accuracy of always predicting the
most frequent class, without which an accuracy says little.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (list of int): the predicted classes, 0 or 1.
    references (list of int): the true classes, 0 or 1.
Returns:
    accuracy: share of correct predictions.
    f1: harmonic mean of precision and recall of class 1; 0 if neither predictions nor references hold a 1.
    mcc: Matthews correlation, from -1 to 1; 0 if predictions or references hold one class only.
    majority_accuracy: share of the most frequent class among the references.
Raises:
    ValueError: there is nothing to score, or a value other than 0 and 1.
Examples:
    >>> metric = evaluate.load("rsa_hf/tasks/metrics/defect_detection")
    >>> metric.compute(predictions=[0, 1, 1, 1], references=[0, 1, 1, 0])["accuracy"]
    0.75
"""


class DefectDetection(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Accuracy, F1, MCC and majority-class accuracy of a binary classifier."""

    def _info(self) -> Any:
        # float64, because evaluate would silently round a probability down to class 0 if it were int64.
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
                raise ValueError(f"{name} hold {wrong[0]:g}; allowed are the classes 0 and 1, not scores")
        one_class = len({*predictions, *references}) == 1  # scikit-learn warns, and its correlation is 0
        positives = int(references.sum())
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions, zero_division=0)),
            "mcc": 0.0 if one_class else float(matthews_corrcoef(references, predictions)),
            "majority_accuracy": max(positives, len(references) - positives) / len(references),
        }
