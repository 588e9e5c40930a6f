"""What RSA is compared with: the plain model, and cheaper explanations of what RSA does.

* `plain`: the model as it is.
* `rsa`: `RSAConfig.from_scratch`: all heads are RSA heads in cyclical pairs.
* `published`: half of the heads are, with rates from the paper's start and gates from one half.
* `alibi`: attention with linear biases (Press et al., 2022), so attention itself can prefer what is near.
* `learned toeplitz`: the heads of `rsa` with a learned number for each lag in place of a REM.
* `short convolution`: the same for the last four tokens alone, a short causal convolution of V beside attention.
* `no softmax`: the heads of `rsa` with the gate fixed at 1, so they see P V alone.
* `no recurrence`: the heads of `rsa` with P of zeros, so their gates damp attention, and that is all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsa_hf.config import LayerConfig, RSAConfig
from rsa_hf.heads import RSAHeads, heads_of
from rsa_hf.ops.mask import Geometry
from rsa_hf.patching import patch_model
from rsa_hf.rem import lag_weights

__all__ = ["ARMS", "DAMPED", "PUBLISHED_START", "damp", "make_arm"]

PUBLISHED_START = RSAConfig(gate_init=0.0)
KERNEL = 4  # tokens of the short convolution
LAGS = {"learned toeplitz": None, "short convolution": KERNEL}  # how many lags are learned; None: all
DAMPED = "no recurrence"
ARMS = ("plain", "rsa", "published", "alibi", *LAGS, "no softmax", DAMPED)


def make_arm(arm: str, model: PreTrainedModel, longest: int) -> nn.Module:
    """Turn a plain model into an arm of the comparison.

    Args:
        arm: one of `ARMS`; `alibi` is for Llama.
        model: the plain model, changed in place.
        longest: the most tokens it will see.

    Returns:
        The model, or a wrapper that is called like it.

    Raises:
        ValueError: there is no such arm.
    """
    if arm not in ARMS:
        raise ValueError(f"arm={arm!r}: one of {', '.join(ARMS)} is needed.")
    if arm == "plain":
        return model
    if arm == "alibi":
        return ALiBi(model, longest)
    if arm == "published":
        return patch_model(model, PUBLISHED_START)
    plan = RSAConfig.from_scratch(model.config.num_attention_heads)
    patch_model(model, replace(plan, gate_init=math.inf) if arm == "no softmax" else plan)
    if arm == DAMPED:
        damp(model)
    for module in list(model.modules()):
        heads = heads_of(module)
        if heads is None:
            continue
        if arm in LAGS:
            module.rsa = LearnedLags(heads, LAGS[arm] or longest - 1)
        elif arm == "no softmax":
            heads.mu.requires_grad_(False)
    return model


def damp(model: nn.Module) -> None:
    """Give a patched model P of zeros in place of its REMs: the rest of RSA, to be told from recurrence."""
    for module in list(model.modules()):
        heads = heads_of(module)
        if heads is not None:
            module.rsa = Damped(heads)


class ALiBi(nn.Module):
    """A causal model whose attention gets a bias −slope · τ, one slope a head.

    Args:
        model: takes a 4-D mask.
        longest: the most tokens.
    """

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
        """What the model returns."""
        T = input_ids.shape[1]
        return self.model(input_ids, attention_mask=self.bias[:, :, :T, :T], **keywords)


class LearnedLags(RSAHeads):
    """RSA heads with f(τ) a learned number for each head and lag, which starts as the REM's.

    Gates learn at the pace of RSA's, the numbers at that of the weights.

    Args:
        heads: the RSA heads whose place it takes.
        longest: the longest lag; f is 0 beyond.
    """

    def __init__(self, heads: RSAHeads, longest: int) -> None:
        plan: LayerConfig = heads.plan
        super().__init__(plan)
        decay, theta = heads.per_head(heads.rates())
        lags = torch.arange(1, longest + 1)
        f = [
            lag_weights(kind, decay[r], theta[r], lags, dilation)
            for r, (kind, dilation) in enumerate(zip(plan.kinds, plan.dilations, strict=True))
        ]
        self.eta = self.nu = self.theta = None
        self.f = nn.Parameter(torch.stack(f).detach())

    def forward(self, attention: Tensor, value: Tensor, geometry: Geometry) -> Tensor:
        """Mix P V into attention [B, T, H, D]."""
        R, longest = self.f.shape
        product = (_convolved if longest == KERNEL else _multiplied)(self.f, value[:, :R]).transpose(1, 2)
        gate = torch.sigmoid(self.mu * self.plan.parameter_scale)
        return torch.cat([torch.lerp(attention[:, :, :R], product, gate), attention[:, :, R:]], dim=2)


class Damped(RSAHeads):
    """RSA heads with P of zeros.

    Args:
        heads: the RSA heads whose place it takes.
    """

    def __init__(self, heads: RSAHeads) -> None:
        super().__init__(heads.plan)
        self.eta = self.nu = self.theta = None

    def forward(self, attention: Tensor, value: Tensor, geometry: Geometry) -> Tensor:
        """Attention [B, T, H, D] with its RSA heads times 1 − σ(μ)."""
        R = self.plan.num_rsa_heads
        kept = 1 - torch.sigmoid(self.mu * self.plan.parameter_scale)
        return torch.cat([kept * attention[:, :, :R], attention[:, :, R:]], dim=2)


def _multiplied(f: Tensor, value: Tensor) -> Tensor:
    """P V with P written out."""
    T = value.shape[2]
    position = torch.arange(T, device=value.device)
    lag = position[:, None] - position
    longest = f.shape[1]
    return torch.where((lag > 0) & (lag <= longest), f[:, (lag - 1).clamp(0, longest - 1)], 0) @ value


def _convolved(f: Tensor, value: Tensor) -> Tensor:
    """P V lag by lag, which is cheaper for a few of them."""
    T, longest = value.shape[2], f.shape[1]
    padded = nn.functional.pad(value, (0, 0, longest, 0))
    product = torch.zeros_like(value)
    for lag in range(1, longest + 1):
        product = product + f[:, lag - 1, None, None] * padded[:, :, longest - lag :][:, :, :T]
    return product
