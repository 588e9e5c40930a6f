"""The networks and their training: a small GPT-2 with and without RSA heads, and an LSTM.

GPT-2's position embeddings are zeros (Kazemnejad et al., 2023, The impact of positional encoding on length
generalization in Transformers): learned ones end with the longest training string. The causal mask and a first token
let it count. Position ids of 0 would not do the same: they mean that every token starts a packed text of its own.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Model

from experiments.byte_models import small_gpt2
from experiments.regular_languages.languages import Automaton, legal_next
from experiments.runner.fit import fit
from rsa_hf import RSAConfig, param_groups, patch_model
from rsa_hf.models.recurrent import RecurrentConfig, RecurrentModel

HEADS = 8
LONGEST = 151
VARIANTS = ("rsa", "transformer", "lstm")
PATIENCE, LEARNT = 50, 1e-4
# On half of the heads: a slow REM (λ > 0), an alternating one (λ < 0), and a cyclical pair; gates at ½.
PLAN = RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_init=0.0)


class StepPredictor(nn.Module):
    """A causal network with a linear layer that predicts for K characters and the end whether they may come next."""

    def __init__(self, body: nn.Module, hidden_size: int, num_targets: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(hidden_size, num_targets)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, K + 1] after each of the tokens [B, T]."""
        logits: Tensor = self.head(self.body(tokens, use_cache=False).last_hidden_state)
        return logits


def make_network(variant: str, num_characters: int, width: int, layers: int) -> StepPredictor:
    """One of `VARIANTS` with random weights, for K characters, a token for the beginning and a target for the end."""
    size = num_characters + 1
    if variant == "lstm":
        sizes: dict[str, Any] = {"vocab_size": size, "hidden_size": width, "num_hidden_layers": layers}
        return StepPredictor(RecurrentModel(RecurrentConfig(cell="lstm", dropout=0.0, **sizes)), width, size)
    body = GPT2Model(small_gpt2(size, LONGEST, width, layers, HEADS))
    with torch.no_grad():
        body.wpe.weight.zero_()
    body.wpe.weight.requires_grad_(False)
    predictor = StepPredictor(body, width, size)
    if variant == "rsa":
        patch_model(body, PLAN)
    return predictor


class Batch(NamedTuple):
    """Strings of one language, at most T characters long, with K characters in the alphabet."""

    tokens: Tensor  # the beginning, K, and the characters, 0 … K − 1; [B, T + 1]
    targets: Tensor  # whether each character, and last the end, may come next; [B, T + 1, K + 1]
    real: Tensor  # the steps that belong to a string; the others are padding; [B, T + 1]

    def take(self, rows: Tensor | slice) -> "Batch":
        """Some of the strings, cut at the end of the longest."""
        steps = int(self.real[rows].sum(1).max())
        return Batch(*(tensor[rows, :steps] for tensor in self))

    def to(self, device: torch.device) -> "Batch":
        """The batch on another device."""
        return Batch(*(tensor.to(device) for tensor in self))


def encode(language: Automaton, strings: Sequence[str]) -> Batch:
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


def correct_strings(logits: Tensor, batch: Batch) -> Tensor:
    """Whether all K + 1 predictions, logits [B, T + 1, K + 1], are correct at every step of a string: [B]."""
    correct = ((logits > 0) == (batch.targets > 0.5)).all(-1)
    return (correct | ~batch.real).all(-1)


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch, size: int = 100) -> float:
    """Share of strings that are predicted correctly at every step."""
    model.eval()
    count = len(batch.tokens)
    parts = [batch.take(slice(start, start + size)) for start in range(0, count, size)]
    return sum(int(correct_strings(model(part.tokens), part).sum()) for part in parts) / count


def train(
    model: StepPredictor, data: Batch, steps: int, batch_size: int, learning_rate: float, seed: int
) -> tuple[int, float]:
    """Train with AdamW on binary cross-entropy; the learning rate falls linearly to 0.

    Training ends early when the mean loss of the last 50 steps is below 10⁻⁴. `seed` draws the strings of each step,
    with replacement. Returns the number of steps, and the mean loss of the last 50, in nats per prediction.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate, weight_decay=0.0), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses: list[float] = []

    def loss(step: int) -> Tensor:
        batch = data.take(torch.randint(len(data.tokens), (batch_size,), generator=generator))
        return F.binary_cross_entropy_with_logits(model(batch.tokens)[batch.real], batch.targets[batch.real])

    def has_learnt(step: int, value: Tensor) -> bool:
        losses.append(float(value))
        return len(losses) >= PATIENCE and fmean(losses[-PATIENCE:]) < LEARNT

    taken = fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=has_learnt)
    return taken, fmean(losses[-PATIENCE:])
