"""Byte-level language models from scratch: the same training for every arm, with the curve that it draws."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, get_scheduler

from rsa_hf.experiments.runner.data import data_file
from rsa_hf.tasks.language_modeling import (
    LanguageModelingDataConfig,
    PreparedText,
    TrainingBlocks,
    evaluate_language_model,
    prepare_language_modeling,
)
from rsa_hf.training.optimizer import param_groups

__all__ = ["SHAPES", "Curve", "Shape", "build", "read_corpus", "train_on_bytes"]

WIKITEXT_FILES = {"train": "train", "validation": "valid"}


@dataclass(frozen=True)
class Shape:
    """The size of a model and of its batches.

    Attributes:
        layers: how many.
        width: hidden size; the feed-forward layers are four times as wide.
        heads: per layer.
        block: bytes in a block.
        batch: blocks in a step.
    """

    layers: int
    width: int
    heads: int
    block: int
    batch: int


# By the number of their parameters, roughly.
SHAPES = {
    "0.03M": Shape(2, 32, 4, 64, 8),
    "0.1M": Shape(2, 64, 8, 128, 8),
    "1M": Shape(4, 128, 8, 256, 16),
    "10M": Shape(8, 320, 8, 512, 16),
    "30M": Shape(9, 512, 8, 512, 32),
}


@dataclass(frozen=True)
class Curve:
    """Bits per byte on the validation text while a model learns.

    Attributes:
        tokens: bytes trained on, at each evaluation.
        bits_per_byte: at each evaluation.
    """

    tokens: list[float]
    bits_per_byte: list[float]

    def tokens_until(self, target: float) -> float:
        """Bytes after which the curve first is at `target` or below, between evaluations by a line; or infinity."""
        before: tuple[float, float] | None = None
        for tokens, score in zip(self.tokens, self.bits_per_byte, strict=True):
            if score <= target:
                if before is None or score == before[1]:
                    return tokens
                return before[0] + (tokens - before[0]) * (before[1] - target) / (before[1] - score)
            before = (tokens, score)
        return float("inf")

    def score_at(self, tokens: float) -> float:
        """Bits per byte after so many bytes, between evaluations by a line, before the first one what that gave."""
        return float(np.interp(tokens, self.tokens, self.bits_per_byte))


def build(family: str, shape: Shape) -> PreTrainedModel:
    """A byte-level model with random weights: `gpt2`, with learned positions, or `llama`, with rotary ones."""
    if family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
                n_embd=shape.width,
                n_layer=shape.layers,
                n_head=shape.heads,
                n_positions=shape.block,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        model.loss_type = "ForCausalLM"  # transformers does not find it by the name of the class, and says so
        return model
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=shape.width,
            intermediate_size=4 * shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            max_position_embeddings=shape.block,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


@functools.lru_cache(maxsize=4)  # each run of an experiment asks again
def read_corpus(corpus: str, train_bytes: int, eval_bytes: int, block: int) -> PreparedText:
    """The first `train_bytes` of a text to train on, and `eval_bytes` of other text to score.

    Args:
        corpus: `enwik8`, `wikitext-2` or `python` (source code of the standard library).
        train_bytes: at most.
        eval_bytes: at most.
        block: bytes in a block.

    Raises:
        FileNotFoundError: the data is not there.
    """
    files = {}
    if corpus == "enwik8":
        files = {"train": str(data_file("enwik8/enwik8_prefix.xz"))}
    elif corpus == "wikitext-2":
        files = {split: str(data_file(f"wikitext-2/{name}.txt.xz")) for split, name in WIKITEXT_FILES.items()}
    config = LanguageModelingDataConfig(
        source="files" if files else "embedded",
        files=files,
        block_size=block,
        max_train_bytes=train_bytes,
        max_eval_bytes=eval_bytes,
    )
    return prepare_language_modeling(config, None)


def train_on_bytes(
    model: nn.Module,
    text: PreparedText,
    shape: Shape,
    *,
    learning_rate: float,
    steps: int,
    evaluations: int,
    seed: int,
) -> Curve:
    """Train, and score the model `evaluations` times on the way.

    AdamW, weight decay 0.01 on matrices, gradients clipped at norm 1; the learning rate rises for a twentieth of the
    steps and then stays, so that the curve does not depend on where it ends. Blocks come in an order that `seed`
    shuffles, anew for each pass.
    """
    blocks = text.train
    assert isinstance(blocks, TrainingBlocks)
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate, weight_decay=0.01))
    schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=max(1, steps // 20))
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    order: list[int] = []
    tokens, scores = list[float](), list[float]()
    marks = {round(steps * (i + 1) / evaluations) for i in range(evaluations)}
    for step in range(1, steps + 1):
        model.train()
        while len(order) < shape.batch:
            order += torch.randperm(len(blocks), generator=generator).tolist()
        rows = [blocks[i] for i in order[: shape.batch]]
        del order[: shape.batch]
        batch = {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step in marks:
            tokens.append(float(step * shape.batch * shape.block))
            scores.append(evaluate_language_model(model, text.validation, 32)["bits_per_byte"])
    return Curve(tokens, scores)
