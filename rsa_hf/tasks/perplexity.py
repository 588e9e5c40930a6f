"""The score of a language model on a text: perplexity per token and per word, bits per byte, never mixed up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import default_collate

from rsa_hf.tasks.language_modeling import IGNORED_LABEL, EvaluationBlocks
from rsa_hf.tasks.texts import check_integer

__all__ = ["LanguageModelingScore", "evaluate_language_model"]


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


def evaluate_language_model(
    model: torch.nn.Module,
    blocks: EvaluationBlocks,
    batch_size: int,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Score a causal language model on every token of a text but the first.

    The model runs in eval mode and without gradients; each of its modules gets back the mode it was in.

    Args:
        model: Any causal language model of transformers: takes `input_ids` [B, T], gives `logits` [B, T, V].
        blocks: The text.
        batch_size: Blocks in a batch. The result does not depend on it: nothing is padded, losses are summed.
        device: Where the batches are put; None for where the model's parameters are. The model is not moved.

    Returns:
        The dict of `LanguageModelingScore.compute`.

    Raises:
        ValueError: A batch size below 1, or a token id outside the model's vocabulary.
    """
    check_integer("batch_size", batch_size, 1)
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = int(blocks.token_ids.max())
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the text has token id {largest} but the model's vocab_size is {vocab_size}, so ids up to "
            f"{vocab_size - 1} are allowed; use the model's own tokenizer, or resize_token_embeddings"
        )
    if device is None:
        device = next(model.parameters()).device
    score = LanguageModelingScore(blocks.num_bytes, blocks.num_words)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for batch in _batches_of_equal_length(blocks, batch_size):
                targets = batch["labels"][:, 1:].to(device)
                logits = model(input_ids=batch["input_ids"].to(device)).logits[:, :-1]
                scored = targets != IGNORED_LABEL
                logits = logits[scored]
                # Half precision would round the losses before they are summed.
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                losses = torch.nn.functional.cross_entropy(logits, targets[scored], reduction="none")
                score.update(losses.cpu().double().sum().item(), losses.numel())
    finally:
        for module, training in modes:
            module.training = training
    return score.compute()


def _batches_of_equal_length(blocks: EvaluationBlocks, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    last = len(blocks) - 1  # the only block that may be short: alone, so that nothing is padded
    for begin in range(0, last, batch_size):
        yield default_collate([blocks[index] for index in range(begin, min(begin + batch_size, last))])
    yield default_collate([blocks[last]])
