"""What RSA is compared with: the plain model, and cheaper explanations of what RSA does.

* `plain`: the model as it is.
* `rsa`: `RSAConfig.from_scratch`: all heads are RSA heads in cyclical pairs.
* `published`: half of the heads are, with rates from the paper's start and gates from one half.
* `alibi`: attention with linear biases (Press et al., 2022), so attention itself can prefer what is near.
* `toeplitz`: the heads of `rsa` with a learned number for each lag in place of a REM.
* `convolution`: a causal convolution over four tokens on V (as in Primer, So et al., 2021), starting as the identity.
* `no softmax`: the heads of `rsa` with the gate fixed at 1, so they see P V alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsa_hf.config import HeadPlan, RSAConfig
from rsa_hf.geometry import Geometry
from rsa_hf.heads import RSAHeads
from rsa_hf.lookup import heads_of
from rsa_hf.patching import patch_model
from rsa_hf.rem import lag_weights

__all__ = ["ARMS", "CONTROLS", "make_arm"]

CONTROLS = ("alibi", "toeplitz", "convolution", "no softmax")
ARMS = ("plain", "rsa", "published", *CONTROLS)
KERNEL = 4


def make_arm(arm: str, model: PreTrainedModel, longest: int) -> nn.Module:
    """Turn a plain model into an arm of the comparison.

    Args:
        arm: one of `ARMS`; `convolution` and `alibi` are for Llama.
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
    if arm == "convolution":
        for layer in model.get_submodule("model.layers").children():
            attention = layer.get_submodule("self_attn")
            projection = attention.get_submodule("v_proj")
            assert isinstance(projection, nn.Linear)
            attention.v_proj = nn.Sequential(projection, CausalConvolution(projection.out_features))
        return model
    if arm == "published":
        return patch_model(model, RSAConfig(gate_init=0.0))
    plan = RSAConfig.from_scratch(model.config.num_attention_heads)
    patch_model(model, replace(plan, gate_init=math.inf) if arm == "no softmax" else plan)
    for module in list(model.modules()):
        heads = heads_of(module)
        if heads is None:
            continue
        if arm == "toeplitz":
            module.rsa = LearnedLags(heads, longest)
        elif arm == "no softmax":
            heads.mu.requires_grad_(False)
    return model


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


class CausalConvolution(nn.Module):
    """Each channel convolved over the last four tokens, the identity at first.

    Args:
        channels: of the input, [B, T, channels].
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        weight = torch.zeros(channels, 1, KERNEL)
        weight[..., -1] = 1
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, [B, T, channels]."""
        padded = nn.functional.pad(x.transpose(1, 2), (KERNEL - 1, 0))
        return nn.functional.conv1d(padded, self.weight, groups=len(self.weight)).transpose(1, 2)


class LearnedLags(RSAHeads):
    """RSA heads with f(τ) a learned number for each head and lag, which starts as the REM's.

    Args:
        heads: the RSA heads whose place it takes.
        longest: the most tokens; f is 0 beyond.
    """

    def __init__(self, heads: RSAHeads, longest: int) -> None:
        plan: HeadPlan = heads.plan
        super().__init__(plan)
        decay, theta = heads.per_head(heads.rates())
        lags = torch.arange(longest)
        f = [
            lag_weights(kind, decay[r], theta[r], lags, dilation)
            for r, (kind, dilation) in enumerate(zip(plan.kinds, plan.dilations, strict=True))
        ]
        self.eta = self.nu = self.theta = None
        self.f = nn.Parameter(torch.stack(f).detach() / plan.parameter_scale)

    def forward(self, attention: Tensor, value: Tensor, geometry: Geometry) -> Tensor:
        """Mix P V into attention [B, T, H, D], P being dense."""
        R, T = len(self.f), attention.shape[1]
        position = torch.arange(T, device=value.device)
        lag = position[:, None] - position
        P = torch.where(lag > 0, (self.f * self.plan.parameter_scale)[:, lag.clamp(min=0)], 0)
        product = (P @ value[:, :R]).transpose(1, 2)
        gate = torch.sigmoid(self.mu * self.plan.parameter_scale)
        return torch.cat([torch.lerp(attention[:, :, :R], product, gate), attention[:, :, R:]], dim=2)
