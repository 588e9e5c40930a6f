"""The metrics of the tasks as `evaluate` modules that ship with the package, so they need no Hub."""

from __future__ import annotations

import math
from pathlib import Path

import evaluate

__all__ = ["load_metric", "perplexities"]


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Load one of the package's metrics.

    Args:
        name: "defect_detection" or "language_modeling".

    Returns:
        The module. It keeps predictions in memory, so that processes that score at the same time do not share files.

    Raises:
        ValueError: There is no metric of that name.
    """
    folder = Path(__file__).parent / name
    if not (folder / f"{name}.py").is_file():
        known = sorted(path.stem for path in Path(__file__).parent.glob("*/*.py") if path.stem == path.parent.name)
        raise ValueError(f"there is no metric {name!r}; choose one of {', '.join(known)}")
    return evaluate.load(str(folder), keep_in_memory=True)


def perplexities(nll_nats: float, num_tokens: int, num_words: int, num_bytes: int) -> dict[str, float]:
    """Perplexity per token and per word and bits per byte of a text.

    Args:
        nll_nats: The sum (not the mean) of the tokens' negative log-likelihoods, in nats.
        num_tokens: Number of scored tokens.
        num_words: Number of words of the scored text.
        num_bytes: Number of bytes of the scored text.

    Returns:
        `loss_nats_per_token`; `token_perplexity`, its exponential; `word_perplexity`, NaN for a text without words;
        `bits_per_byte`; and the three counts. A perplexity that overflows a float is infinite; NaN stays NaN.

    Raises:
        ValueError: The sum or a count is negative, or there are no tokens or bytes.
    """
    if nll_nats < 0 or num_tokens < 1 or num_words < 0 or num_bytes < 1:
        raise ValueError(
            f"nll_nats={nll_nats}, num_tokens={num_tokens}, num_words={num_words}, num_bytes={num_bytes}: a sum of "
            "negative log-likelihoods is at least 0 (check the sign), and a text has at least one token and one byte"
        )
    return {
        "loss_nats_per_token": nll_nats / num_tokens,
        "token_perplexity": _exp(nll_nats / num_tokens),
        "word_perplexity": _exp(nll_nats / num_words) if num_words else math.nan,
        "bits_per_byte": nll_nats / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
        "num_words": num_words,
        "num_bytes": num_bytes,
    }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
