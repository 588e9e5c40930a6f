"""The scores of the tasks as modules of the library `evaluate`."""

from typing import Any

import evaluate
from datasets import Features, Value

from rsa_hf.tasks.defect_scores import classification_scores
from rsa_hf.tasks.text_scores import perplexities

_COUNTS = ("num_tokens", "num_words", "num_bytes")


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Load the scores of a task. Predictions are kept in memory, not in files.

    Args:
        name: "defect_detection": `classification_scores` of predicted and true classes, 0 or 1; `compute` also takes
            `prediction_scores`. "language_modeling": `perplexities` of parts of a text, which are summed before
            dividing; predictions are sums of losses in nats, references dicts of the three counts.
    """
    return {"defect_detection": _DefectDetection, "language_modeling": _LanguageModeling}[name](keep_in_memory=True)


class _DefectDetection(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> Any:
        # float64, because evaluate would silently round a probability down to class 0 if it were int64.
        features = Features({"predictions": Value("float64"), "references": Value("float64")})
        return evaluate.MetricInfo(classification_scores.__doc__, "", features, format="numpy")

    _compute = staticmethod(classification_scores)


class _LanguageModeling(evaluate.Metric):  # type: ignore[misc]
    def _info(self) -> Any:
        features = Features(
            {"predictions": Value("float64"), "references": {name: Value("int64") for name in _COUNTS}}
        )
        return evaluate.MetricInfo(perplexities.__doc__, "", features)

    def _compute(self, predictions: list[float], references: list[dict[str, int]]) -> dict[str, float]:
        return perplexities(sum(predictions), *(sum(reference[name] for reference in references) for name in _COUNTS))
