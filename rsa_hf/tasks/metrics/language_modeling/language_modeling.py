"""`evaluate` module of language modelling: perplexities and bits per byte from summed log-likelihoods."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

# evaluate runs a copy of this file from its cache, so the import is absolute.
from rsa_hf.tasks.metrics import perplexities

_DESCRIPTION = """
Token perplexity, word perplexity and bits per byte of a language model. The input is, for each text or part of one,
the sum of its negative log-likelihoods and the counts of what was scored. They are summed before dividing.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (list of float): for each text, the summed negative log-likelihood of its tokens, in nats.
    references (list of dict): for each text, `num_tokens`, `num_words` and `num_bytes` of its scored part.
        Words are separated by whitespace; whether line ends count as words is the caller's choice.
Returns:
    loss_nats_per_token, token_perplexity, word_perplexity, bits_per_byte, num_tokens, num_words, num_bytes.
Examples:
    >>> metric = evaluate.load("rsa_hf/tasks/metrics/language_modeling")
    >>> reference = {"num_tokens": 2, "num_words": 1, "num_bytes": 2}
    >>> metric.compute(predictions=[2.772588722239781], references=[reference])["bits_per_byte"]
    2.0
"""


class LanguageModeling(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Perplexities and bits per byte, summed over the references."""

    def _info(self) -> Any:
        counts = {name: datasets.Value("int64") for name in ("num_tokens", "num_words", "num_bytes")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Value("float64"), "references": counts}),
        )

    def _compute(self, predictions: list[float], references: list[dict[str, int]]) -> dict[str, float]:
        names = ("num_tokens", "num_words", "num_bytes")
        return perplexities(sum(predictions), *(sum(reference[name] for reference in references) for name in names))
