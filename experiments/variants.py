"""The variants of a model that experiments compare.

* `plain`: the model as it is.
* `rsa`: all heads are RSA heads in cyclical pairs, whose gates and rates learn 20 times as fast as the weights.
* `two free lags`: `RSAConfig.from_scratch`: as `rsa`, with the first two lags free, and at the pace of the weights.
* `published`: half of the heads are RSA heads, with the paper's initial rates and gates of one half.
* `alibi`: attention with linear biases (Press et al., 2022), a preference for near tokens without RSA.
* `learned toeplitz`: as `rsa`, with a learned weight for each lag in place of a REM.
* `short convolution`: as `rsa`, with learned weights for the last four tokens alone; `token shift`: for the last one.
* `no softmax`: as `rsa` with the gate fixed at 1, so that only P V is left.
* `no recurrence`: as `rsa` with P = 0, so that gates only damp attention.
* `pace of the weights`: as `rsa`, with gates and rates that learn as fast as the weights (`parameter_scale` 1).
* `half of the heads`: as `rsa` on the first half of the heads, with plain attention in the others.
* `dilated heads`: as `rsa`, with the second half of the heads dilated by 6, about an English word with its space.

Some replace the RSA heads (`forms.py`): rows are not padded, and there is no cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.forms import FormHeads
from rsa_hf import RSAConfig, RSAHeads, patch_model

PUBLISHED_START = RSAConfig(gate_init=0.0)
DEFAULT = "two free lags"
CONVOLUTION, SHIFT, NO_RECURRENCE = "short convolution", "token shift", "no recurrence"
LAGS = {"learned toeplitz": None, CONVOLUTION: 4, SHIFT: 1}  # number of learned lags; None: all
WORD = 6  # bytes
PACE, HALF, DILATED = "pace of the weights", "half of the heads", "dilated heads"
BEYOND_RSA = (PACE, HALF, DILATED)
VARIANTS = (
    *("plain", "rsa", "published", "alibi", "learned toeplitz", CONVOLUTION, "no softmax", NO_RECURRENCE),
    *(*BEYOND_RSA, DEFAULT),
)


def patched_modules(model: nn.Module) -> Iterator[tuple[nn.Module, RSAHeads]]:
    """The patched modules with their RSA heads."""
    for module in list(model.modules()):
        if isinstance(heads := getattr(module, "rsa", None), RSAHeads):
            yield module, heads


def add_rsa(model: PreTrainedModel, variant: str, config: RSAConfig | None) -> None:
    """Patch a model in place, with P = 0 if the variant is `no recurrence`; leave it as it is without a config."""
    if config is not None:
        patch_model(model, config)
    if variant == NO_RECURRENCE:
        for module, heads in patched_modules(model):
            module.rsa = FormHeads(heads, "nothing")


def variant_config(variant: str, num_heads: int) -> RSAConfig | None:
    """The config of one of `VARIANTS` of a model with H heads a layer; None for `plain`."""
    default = RSAConfig.from_scratch(num_heads)
    config = replace(default, num_free_lags=0, parameter_scale=20.0)
    half = replace(config, num_cyclical_pairs=num_heads // 4)
    configs = {
        "plain": None,
        DEFAULT: default,
        "published": PUBLISHED_START,
        "no softmax": replace(config, gate_init=math.inf),
        PACE: replace(config, parameter_scale=1.0),
        HALF: half,
        DILATED: replace(half, num_dilated_cyclical_pairs=num_heads // 4, dilation=WORD),
    }
    return configs.get(variant, config)


def make_variant(variant: str, model: PreTrainedModel, longest: int) -> nn.Module:
    """Turn a plain model into one of `VARIANTS`, in place; `alibi` is a wrapper that is called like the model.

    `alibi` is for Llama. No input is longer than `longest` tokens.
    """
    if variant == "alibi":
        return ALiBi(model, longest)
    H = model.config.num_attention_heads
    add_rsa(model, variant, variant_config(variant, H))
    for module, heads in patched_modules(model):
        if variant in LAGS:
            module.rsa = FormHeads(heads, "kernel", LAGS[variant] or longest - 1)
        elif variant == "no softmax":
            heads.mu.requires_grad_(False)
    return model


class ALiBi(nn.Module):
    """A causal model with a bias −slope · τ on its attention scores, one slope per head, as a 4-D mask."""

    bias: Tensor

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        super().__init__()
        self.model = model
        H = model.config.num_attention_heads
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)])
        position = torch.arange(longest)
        lag = position[:, None] - position
        bias = (-slopes[:, None, None] * lag).masked_fill(lag < 0, torch.finfo(torch.float32).min)
        self.register_buffer("bias", bias[None], persistent=False)

    def forward(self, input_ids: Tensor, **keywords: Any) -> Any:
        """The output of the model."""
        T = input_ids.shape[1]
        return self.model(input_ids, attention_mask=self.bias[:, :, :T, :T], **keywords)


def scale_heads(attention: Tensor, heads: tuple[int, ...], factor: Tensor) -> Tensor:
    """Multiply some heads of [B, T, H, D] by a factor for all of them (1,) or for each (R,)."""
    factors = factor.new_ones(attention.shape[2])
    factors[list(heads)] = factor.expand(len(heads))
    return (factors[:, None] * attention).to(attention.dtype)
