"""Perplexity per token and per word and bits per byte, from summed log-likelihoods."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rsa_hf.utils.checks import check_integer

__all__ = ["LanguageModelingScore"]


@dataclass
class LanguageModelingScore:
    """Sums the log-likelihood of a text and gives its perplexities and bits per byte.

    Attributes:
        num_bytes: Bytes of the scored text.
        num_words: Words of the scored text.
        nll_nats: Negative log-likelihood so far, in nats.
        num_tokens: Scored tokens so far.

    Raises:
        ValueError: A negative count, or no bytes.
    """

    num_bytes: int
    num_words: int
    nll_nats: float = 0.0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        check_integer("num_bytes", self.num_bytes, 1)
        check_integer("num_words", self.num_words, 0)

    def update(self, nll_nats: float, num_tokens: int) -> None:
        """Add scored tokens.

        Args:
            nll_nats: The *sum* of their negative log-likelihoods in nats, not the mean. NaN and infinity are
                kept, so that a diverged model shows in the result.
            num_tokens: How many they are.

        Raises:
            ValueError: A negative sum or count.
        """
        if nll_nats < 0:
            raise ValueError(
                f"nll_nats is {nll_nats!r}; a sum of negative log-likelihoods is at least 0: check the sign"
            )
        check_integer("num_tokens", num_tokens, 0)
        self.nll_nats += nll_nats
        self.num_tokens += num_tokens

    def compute(self) -> dict[str, float]:
        """The score of all that was added.

        Returns:
            `loss_nats_per_token`; `token_perplexity`, its exponential; `word_perplexity`, NaN for a text
            without words; `bits_per_byte`; and the divisors `num_tokens`, `num_words` and `num_bytes`. A
            perplexity too large for a float is infinite.

        Raises:
            ValueError: No token was scored.
        """
        if self.num_tokens == 0:
            raise ValueError("num_tokens is 0; call update() with at least one scored token before compute()")
        loss = self.nll_nats / self.num_tokens
        return {
            "loss_nats_per_token": loss,
            "token_perplexity": _exp(loss),
            "word_perplexity": _exp(self.nll_nats / self.num_words) if self.num_words else math.nan,
            "bits_per_byte": self.nll_nats / math.log(2) / self.num_bytes,
            "num_tokens": self.num_tokens,
            "num_words": self.num_words,
            "num_bytes": self.num_bytes,
        }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
