"""The variants of a calibrated model: what `calibrate` has chosen, and controls that take it apart.

* `plain`: the model as it is.
* `first heads`: `RSAConfig()`, half of the heads of each layer whatever they do.
* `random heads`: as many heads as calibrated, and REMs of the dictionary, at random, with the same shares.
* `no recurrence`: the calibrated heads and gates with P = 0.
* `scaled heads`: the calibrated heads, each multiplied by a learned factor in place of a REM.
* `all heads scaled`: every head of the model multiplied by a learned factor.
* `calibrated`: the plan that `calibrate` returns.
* `calibrated after training`: the plain model is trained, and then calibrated on rows that it has not seen.
* `calibrated and scaled`: of its heads those with the largest shares, at most half as many as the model has, each with
  a gate and a factor to be learned and its rate as chosen: no more numbers than `all heads scaled` has.
* `calibrated and all heads scaled`: the plan as chosen, and every head of the model multiplied by a learned factor; no
  more is learned than in `all heads scaled`.
* `smallest lora`, `ia3`: PEFT's methods with their fewest parameters, on the modules that PEFT chooses.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.forms import FormHeads
from experiments.variants import NO_RECURRENCE, patched_modules, scale_heads
from rsa_hf import HeadConfig, RSAConfig, RSAHeads, patch_model, rem_matrix
from rsa_hf.calibration.choice import DICTIONARY

PLAIN, FIRST, RANDOM = "plain", "first heads", "random heads"
SCALED, ALL_SCALED = "scaled heads", "all heads scaled"
CALIBRATED, WITH_FACTORS, AFTER = "calibrated", "calibrated and scaled", "calibrated after training"
WITH_ALL_FACTORS = "calibrated and all heads scaled"
LORA, IA3 = "smallest lora", "ia3"
WIDEST_GATE = 0.9


def make_variant(variant: str, model: PreTrainedModel, plan: RSAConfig, length: int, seed: int) -> Any:
    """Turn a plain model into what a variant is before training, in place, for rows of `length` tokens."""
    if variant in (LORA, IA3):
        config = peft.LoraConfig(r=1, lora_alpha=1) if variant == LORA else peft.IA3Config()
        return peft.get_peft_model(model, config)
    plans = {
        FIRST: RSAConfig(),
        RANDOM: _random_plan(model, plan, length, seed),
        ALL_SCALED: _all_heads(model, RSAConfig(heads=())),
        WITH_FACTORS: _strongest(plan, len(_places(model)) // 2, length),
        WITH_ALL_FACTORS: _all_heads(model, plan),
    }
    plan = plans.get(variant, plan)
    if variant in (PLAIN, AFTER) or plan.heads == ():
        return model
    patch_model(model, plan)
    for module, heads in patched_modules(model):
        if variant == NO_RECURRENCE:
            module.rsa = FormHeads(heads, "nothing")
        elif variant in (SCALED, ALL_SCALED):
            module.rsa = ScaledHeads(heads, with_rems=False)
        elif variant in (WITH_FACTORS, WITH_ALL_FACTORS):
            module.rsa = ScaledHeads(heads, train_gates=variant == WITH_FACTORS)
    return model


class ScaledHeads(RSAHeads):
    """RSA heads whose attention is multiplied by a learned factor, which starts at 1; rates are not trained.

    Without REMs no P V is mixed into what is scaled.
    """

    def __init__(self, heads: RSAHeads, with_rems: bool = True, train_gates: bool = False) -> None:
        super().__init__(heads.spec)
        self.with_rems = with_rems
        self.requires_grad_(False)
        self.mu.requires_grad_(train_gates)
        self.factor = nn.Parameter(torch.zeros(heads.spec.num_rsa_heads))

    def forward(self, attention: Tensor, *value_and_mask: Any) -> Tensor:
        """Attention [B, T, H, D] with its RSA heads scaled, and mixed with P V where there are REMs."""
        attention = scale_heads(attention, self.spec.heads, 1 + self.factor * self.spec.parameter_scale)
        return super().forward(attention, *value_and_mask) if self.with_rems else attention


def _places(model: Any) -> list[tuple[int, int]]:
    """Layer and index of every head of a model."""
    return [(i, j) for i in range(model.config.num_hidden_layers) for j in range(model.config.num_attention_heads)]


def _all_heads(model: Any, plan: RSAConfig) -> RSAConfig:
    """The heads of a plan, and shut gates on all others."""
    chosen = {(head.layer, head.head): head for head in plan.heads or ()}
    heads = (chosen.get(place, HeadConfig(*place, "regular", 0.5, 0.0)) for place in _places(model))
    return RSAConfig(heads=tuple(heads))


def _strongest(plan: RSAConfig, most: int, length: int) -> RSAConfig:
    """The heads with the largest shares g · Σ |f(τ)|."""
    heads = sorted(plan.heads or (), key=lambda head: -head.gate * _mass(head, length))
    return RSAConfig(heads=tuple(heads[:most]))


def _random_plan(model: Any, plan: RSAConfig, length: int, seed: int) -> RSAConfig:
    """As many heads as in a plan, at random places with random REMs, with the same shares g · Σ |f(τ)|."""
    choice = random.Random(seed)
    chosen, heads = plan.heads or (), []
    for head, (layer, place) in zip(chosen, choice.sample(_places(model), len(chosen)), strict=True):
        other = choice.choice(DICTIONARY).head(layer, place, 0.0)
        gate = head.gate * _mass(head, length) / _mass(other, length)
        heads.append(replace(other, gate=min(gate, WIDEST_GATE)))
    return RSAConfig(heads=tuple(heads))


def _mass(head: HeadConfig, length: int) -> float:
    """Σ |f(τ)| over the lags of a row."""
    decay, theta = torch.tensor([[head.decay], [head.theta]], dtype=torch.float64)
    free = None if head.free_lags is None else torch.tensor([head.free_lags], dtype=torch.float64)
    P = rem_matrix(head.kind, decay, theta, head.dilation, query_length=1, key_length=length, free_lags=free)
    return float(P.abs().sum())
