"""Next-character prediction: strings as tensors, learning, and the score that counts whole strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsa_hf.experiments.regular_languages.arms import StepPredictor
from rsa_hf.experiments.regular_languages.languages import Language, legal_next
from rsa_hf.training.optimizer import param_groups

__all__ = ["Batch", "accuracy", "encode", "learn", "right_strings"]

PATIENCE, LEARNT = 50, 1e-4


@dataclass(frozen=True)
class Batch:
    """Strings of one language, the longest T characters long, K characters in the alphabet.

    Attributes:
        tokens: the beginning, K, and the characters, 0 … K − 1; [B, T + 1]. What is behind a string counts nowhere.
        targets: whether each character, and last the end, may come next; [B, T + 1, K + 1].
        real: which steps belong to a string, [B, T + 1].
    """

    tokens: Tensor
    targets: Tensor
    real: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        """Some of the strings, cut behind the longest."""
        real = self.real[rows]
        steps = int(real.sum(1).max())
        return Batch(self.tokens[rows, :steps], self.targets[rows, :steps], real[:, :steps])

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(self.tokens.to(device), self.targets.to(device), self.real.to(device))


def encode(language: Language, strings: Sequence[str]) -> Batch:
    """Strings as tensors."""
    K, steps = len(language.alphabet), max(map(len, strings)) + 1
    tokens = torch.full((len(strings), steps), K)
    targets = torch.zeros(len(strings), steps, K + 1)
    real = torch.zeros(len(strings), steps, dtype=torch.bool)
    for row, string in enumerate(strings):
        end = len(string) + 1
        tokens[row, 1:end] = torch.tensor([language.alphabet.index(c) for c in string], dtype=torch.long)
        k_hot = [[*(c in legal for c in language.alphabet), ends] for legal, ends in legal_next(language, string)]
        targets[row, :end] = torch.tensor(k_hot, dtype=torch.float32)
        real[row, :end] = True
    return Batch(tokens, targets, real)


def right_strings(logits: Tensor, batch: Batch) -> Tensor:
    """Which strings have every step right, all K + 1 answers of it: [B], booleans.

    Args:
        logits: [B, T + 1, K + 1]; an answer is yes above 0.
        batch: the strings.
    """
    right = ((logits > 0) == (batch.targets > 0.5)).all(-1)
    return (right | ~batch.real).all(-1)


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch, size: int = 100) -> float:
    """Share of strings that have every step right."""
    model.eval()
    parts = [batch[slice(start, start + size)] for start in range(0, len(batch), size)]
    return sum(int(right_strings(model(part.tokens), part).sum()) for part in parts) / len(batch)


def learn(
    model: StepPredictor, data: Batch, steps: int, batch_size: int, learning_rate: float, seed: int
) -> tuple[int, float]:
    """Train by AdamW on binary cross-entropy, the learning rate falling linearly to 0.

    It ends early when the mean loss of a number of steps is below 10⁻⁴: little is left to learn from these strings.

    Args:
        model: is trained in place.
        data: the strings to train on.
        steps: at most so many.
        batch_size: strings a step, drawn with replacement.
        learning_rate: of the weights; RSA parameters move faster by their `parameter_scale`.
        seed: of the order.

    Returns:
        The number of steps, and the mean loss of the last up to 50 of them, in nats an answer.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate, weight_decay=0.0), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model.train()
    recent = list[float]()
    for step in range(1, steps + 1):
        batch = data[torch.randint(len(data), (batch_size,), generator=generator)]
        loss = F.binary_cross_entropy_with_logits(model(batch.tokens)[batch.real], batch.targets[batch.real])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[-(PATIENCE - 1) :], float(loss.detach())]
        if len(recent) == PATIENCE and fmean(recent) < LEARNT:
            return step, fmean(recent)
    return steps, fmean(recent)
