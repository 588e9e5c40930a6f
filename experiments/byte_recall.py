"""How well a byte-level model recalls, which its likelihood alone may not tell.

Multi-query associative recall (Arora et al., 2023, Zoology): after a short training on rows of random key-value pairs,
the share of keys whose value the model names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.byte_models import Shape
from experiments.runner.fit import adamw_with_linear_decay, fit
from rsa_hf.tasks.text_blocks import IGNORED_LABEL

SCORED_ROWS = 256


def key_value_rows(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """N rows of key-value pairs, and then their keys in another order, each followed by its value.

    Keys are small letters, each at most once in a row; values are capital letters. T is a multiple of 4, at most 104.
    Returns tokens [N, T], and labels [N, T] of the values in the second half alone.
    """
    K = length // 4

    def permutations(size: int) -> Tensor:
        return torch.rand(count, size, generator=generator).argsort(1)

    keys = ord("a") + permutations(26)[:, :K]
    pairs = torch.stack([keys, torch.randint(ord("A"), ord("Z") + 1, (count, K), generator=generator)], dim=-1)
    asked = pairs.gather(1, permutations(K)[..., None].expand(-1, -1, 2))
    tokens = torch.cat([pairs, asked], dim=1).flatten(1)
    labels = tokens.clone()
    labels[:, : 2 * K] = labels[:, ::2] = IGNORED_LABEL
    return tokens, labels


def recalled_pairs(model: Any, shape: Shape, *, learning_rate: float, steps: int, seed: int) -> float:
    """Train on key-value pairs, in place, and return the share of values recalled on new rows.

    A row has an eighth of the bytes of a block, and a step four times as many rows.
    """
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    optimizer, schedule = adamw_with_linear_decay(model, learning_rate, steps)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        tokens, labels = key_value_rows(count, shape.block // 8, generator)
        return tokens.to(device), labels.to(device)

    def loss(step: int) -> Tensor:
        tokens, labels = draw(4 * shape.batch)
        value: Tensor = model(input_ids=tokens, labels=labels).loss
        return value

    fit(loss, optimizer, steps, model=model, schedule=schedule)
    tokens, labels = draw(SCORED_ROWS)
    with torch.no_grad():
        named = model.eval()(input_ids=tokens).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != IGNORED_LABEL
    return float((named == labels[:, 1:])[asked].float().mean())
