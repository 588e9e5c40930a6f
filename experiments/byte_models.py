"""Byte-level language models trained from scratch: sizes, training, and scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, get_scheduler

from experiments.corpora import training_blocks
from experiments.runner.fit import BestWeights, adamw, batch_loss, evaluation_steps, fit
from rsa_hf.tasks.language_modeling import PreparedText
from rsa_hf.tasks.text_scores import evaluate_language_model

PATIENCE = 5  # evaluations
TEST_PARTS = 20


@dataclass(frozen=True)
class Shape:
    """Size of a model, whose feed-forward layers are four times as wide, and of its batches, in bytes and blocks."""

    layers: int
    width: int
    heads: int
    block: int
    batch: int


# By approximate number of parameters.
SHAPES = {"0.03M": Shape(2, 32, 4, 64, 8), "0.1M": Shape(2, 64, 8, 128, 8), "1M": Shape(4, 128, 8, 256, 16)}


def amount_until(target: float, amounts: Sequence[float], scores: Sequence[float]) -> float:
    """How much of something, such as tokens, until scores first fall to a target, interpolated; infinity if never."""
    before: tuple[float, float] | None = None
    for amount, score in zip(amounts, scores, strict=True):
        if score <= target:
            if before is None or score == before[1]:
                return amount
            return before[0] + (amount - before[0]) * (before[1] - target) / (before[1] - score)
        before = (amount, score)
    return float("inf")


def small_gpt2(vocab_size: int, positions: int, width: int, layers: int, heads: int) -> GPT2Config:
    """The config of a small GPT-2 without special tokens and dropout."""
    sizes: dict[str, Any] = {"n_positions": positions, "n_embd": width, "n_layer": layers, "n_head": heads}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    # GPT-2's own function, in one kernel.
    activation = "gelu_pytorch_tanh"
    return GPT2Config(
        vocab_size=vocab_size, **sizes, activation_function=activation, bos_token_id=None, eos_token_id=None
    )


def small_llama(
    vocab_size: int, positions: int, width: int, feed_forward: int, layers: int, heads: int, *, tied: bool
) -> LlamaForCausalLM:
    """A Llama with random weights, without special tokens."""
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "max_position_embeddings": positions, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes, bos_token_id=None, eos_token_id=None))


def build(family: str, shape: Shape) -> PreTrainedModel:
    """A byte-level model with random weights: `gpt2` (learned positions) or `llama` (rotary positions)."""
    if family == "llama":
        return small_llama(256, shape.block, shape.width, 4 * shape.width, shape.layers, shape.heads, tied=True)
    model = GPT2LMHeadModel(small_gpt2(256, shape.block, shape.width, shape.layers, shape.heads))
    model.loss_type = "ForCausalLM"  # otherwise transformers warns that the class name does not tell the loss
    return model


def bits_per_byte(model: Any, text: Any, rows: int = 32) -> float:
    """The score of a model on a text, `rows` blocks in a batch."""
    return evaluate_language_model(model, text, rows)["bits_per_byte"]


def bits_by_part(model: Any, text: Any) -> list[float]:
    """The same of consecutive parts of a text of bytes, or of characters, which are equally long."""
    size = len(text.token_ids) // TEST_PARTS
    pieces = text.token_ids[: TEST_PARTS * size].split(size)
    return [bits_per_byte(model, replace(text, token_ids=piece, num_bytes=size - 1)) for piece in pieces]


def train_on_bytes(
    model: nn.Module,
    text: PreparedText,
    shape: Shape,
    *,
    learning_rate: float,
    steps: int,
    evaluations: int,
    seed: int,
    schedule: str = "constant_with_warmup",
    early_stopping: bool = False,
) -> list[float]:
    """Train, and score the model `evaluations` times, evenly spread, in bits per byte. `seed` shuffles the blocks.

    The learning rate is constant after a warm-up over a twentieth of the steps, so that the curve does not depend on
    the number of steps; with the schedule "warmup_stable_decay" it falls linearly to 0 over the last fifth. With early
    stopping, training ends after `PATIENCE` evaluations without a lower score, and the best weights are restored.
    """
    optimizer = adamw(model, learning_rate)
    decay = {"num_decay_steps": steps // 5, "decay_type": "linear"} if schedule == "warmup_stable_decay" else None
    rates = get_scheduler(schedule, optimizer, max(1, steps // 20), steps, scheduler_specific_kwargs=decay)
    best, marks = BestWeights(model), evaluation_steps(steps, evaluations)

    def evaluate(step: int, _: object) -> bool:
        since = best.add(bits_per_byte(model, text.validation)) if step in marks else 0
        return early_stopping and since == PATIENCE

    loss = batch_loss(model, training_blocks(text), shape.batch, seed)
    fit(loss, optimizer, steps, model=model, schedule=rates, after_step=evaluate)
    if early_stopping:
        best.restore()
    return best.scores
