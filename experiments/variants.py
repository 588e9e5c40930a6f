"""The variants of a model that experiments compare.

* `plain`: the model as it is.
* `rsa`: `RSAConfig.from_scratch`: all heads are RSA heads in cyclical pairs.
* `published`: half of the heads are RSA heads, with the paper's initial rates and gates of one half.
* `alibi`: attention with linear biases (Press et al., 2022), a preference for near tokens without RSA.
* `learned toeplitz`: as `rsa`, with a learned weight for each lag in place of a REM.
* `short convolution`: as `rsa`, with learned weights for the last four tokens alone.
* `no softmax`: as `rsa` with the gate fixed at 1, so that only P V is left.
* `no recurrence`: as `rsa` with P = 0, so that gates only damp attention.
* `learned start`: as `rsa`, starting from the gates and rates that a model with another seed has learned.
* `pace of the weights`: as `rsa`, with gates and rates that learn as fast as the weights (`parameter_scale` 1).
* `half of the heads`: as `rsa` on the first half of the heads, with plain attention in the others.
* `dilated heads`: as `rsa`, with the second half of the heads dilated by 6, about an English word with its space.
* `token gates`: as `rsa`, with gates that depend on the token.
* `channel gates`: as `rsa`, with a gate for each channel of a head: as many numbers as token gates have.
* `two rems`: as `rsa`, and the result is mixed with P V of a second, regular REM for each head.
* `rsa on keys`: as `rsa`, and keys are mixed with P K of REMs of their own, before the rotation.
* `rsa on values`: as `rsa`, and the values of attention and of P V are mixed with P V of REMs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsa_hf.config import LayerSpec, RSAConfig
from rsa_hf.heads import RSAHeads, heads_of
from rsa_hf.ops.autograd import apply_rems
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.patching import patch_model
from rsa_hf.rem import lag_weights, mix, put_heads, take_heads

__all__ = ["LEARNED_START", "NO_RECURRENCE", "ON_KEYS", "PUBLISHED_START", "VARIANTS", "add_rsa", "make_variant"]

PUBLISHED_START = RSAConfig(gate_init=0.0)
KERNEL = 4  # tokens of the short convolution
LAGS = {"learned toeplitz": None, "short convolution": KERNEL}  # number of learned lags; None: all
NO_RECURRENCE = "no recurrence"
WORD = 6  # bytes
FURTHER_GATE = -1.0  # μ of REMs beyond those of `rsa`: nearly shut, so that content still finds its keys at first
# Those that go beyond `rsa`.
LEARNED_START = "learned start"
PACE = "pace of the weights"
HALF, DILATED, TWO_REMS = "half of the heads", "dilated heads", "two rems"
TOKEN_GATES, CHANNEL_GATES = "token gates", "channel gates"
ON_KEYS, ON_VALUES = "rsa on keys", "rsa on values"
BEYOND_RSA = (LEARNED_START, PACE, HALF, DILATED, TOKEN_GATES, CHANNEL_GATES, TWO_REMS, ON_KEYS, ON_VALUES)
VARIANTS = (
    *("plain", "rsa", "published", "alibi", *LAGS, "no softmax", NO_RECURRENCE),
    *BEYOND_RSA,
)


def add_rsa(model: PreTrainedModel, variant: str, config: RSAConfig | None) -> None:
    """Patch a model in place, with P = 0 if the variant is `no recurrence`; leave it as it is without a config."""
    if config is not None:
        patch_model(model, config)
    if variant == NO_RECURRENCE:
        for module, heads in _heads(model):
            module.rsa = WithoutRecurrence(heads)


def variant_config(variant: str, num_heads: int) -> RSAConfig | None:
    """The config of one of `VARIANTS` of a model with H heads a layer; None for `plain`."""
    config = RSAConfig.from_scratch(num_heads)
    half = replace(config, num_cyclical_pairs=num_heads // 4)
    configs = {
        "plain": None,
        "published": PUBLISHED_START,
        "no softmax": replace(config, gate_init=math.inf),
        PACE: replace(config, parameter_scale=1.0),
        HALF: half,
        DILATED: replace(half, num_dilated_cyclical_pairs=num_heads // 4, dilation=WORD),
    }
    return configs.get(variant, config)


def make_variant(variant: str, model: PreTrainedModel, longest: int) -> nn.Module:
    """Turn a plain model into one of `VARIANTS`.

    Args:
        variant: its name; `alibi`, and the last five of `BEYOND_RSA`, are for Llama. `learned start` is as `rsa` here:
            the start is learned by training.
        model: the plain model, changed in place.
        longest: longest input in tokens.

    Returns:
        The model, or a wrapper that is called like it.
    """
    if variant == "alibi":
        return ALiBi(model, longest)
    H = model.config.num_attention_heads
    config = RSAConfig.from_scratch(H)
    add_rsa(model, variant, variant_config(variant, H))
    for module, heads in _heads(model):
        if variant in LAGS:
            module.rsa = LearnedLags(heads, LAGS[variant] or longest - 1)
        elif variant == "no softmax":
            heads.mu.requires_grad_(False)
        elif variant in (TOKEN_GATES, CHANNEL_GATES):
            module.rsa = (TokenGates if variant == TOKEN_GATES else ChannelGates)(heads, model.config.head_dim)
        elif variant == TWO_REMS:
            module.rsa = TwoRems(heads, RSAConfig(num_regular=H, gate_init=FURTHER_GATE).layer_plans([H])[0])
        elif variant in (ON_KEYS, ON_VALUES):
            name = "k_proj" if variant == ON_KEYS else "v_proj"
            plan = replace(config, gate_init=FURTHER_GATE).layer_plans([model.config.num_key_value_heads])[0]
            setattr(module, name, RecurrentProjection(module.get_submodule(name), plan))
    return model


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, RSAHeads]]:
    """The patched modules with their RSA heads."""
    for module in list(model.modules()):
        if (heads := heads_of(module)) is not None:
            yield module, heads


class ALiBi(nn.Module):
    """A causal model with a bias −slope · τ on its attention scores, one slope per head.

    Args:
        model: takes a 4-D mask.
        longest: longest input in tokens.
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
        """The output of the model."""
        T = input_ids.shape[1]
        return self.model(input_ids, attention_mask=self.bias[:, :, :T, :T], **keywords)


class RecurrentProjection(nn.Module):
    """A projection to heads whose output Y becomes (1 − g) Y + g P Y: eq. 4 with Y in place of attention and values.

    Args:
        projection: linear, to all heads; rows are not padded.
        plan: of RSA heads for every one of them.
    """

    def __init__(self, projection: nn.Module, plan: LayerSpec) -> None:
        super().__init__()
        self.projection = projection
        self.heads = RSAHeads(plan)

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden states [B, T, C] → [B, T, H · D]."""
        Y = self.projection(hidden).unflatten(-1, (self.heads.plan.num_rsa_heads, -1))
        T = Y.shape[1]
        mixed: Tensor = self.heads(Y, Y.transpose(1, 2), AttentionMask(T, T, 0, causal=True))
        return mixed.flatten(2)


class TokenGates(RSAHeads):
    """RSA heads whose gate depends on the token: g_t = σ(μ + ⟨w, v_t⟩), where w starts at 0.

    Args:
        heads: the RSA heads to replace; each reads a value head of its own.
        head_size: D.
    """

    def __init__(self, heads: RSAHeads, head_size: int) -> None:
        super().__init__(heads.plan)
        self.w = nn.Parameter(torch.zeros(heads.plan.num_rsa_heads, head_size))

    def forward(self, attention: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:  # type: ignore[override]  # no shards
        """Mix P V into attention [B, T, H, D]; there is no cache, so queries and keys are the same tokens."""
        rems, _ = self._rems_and_gate(heads_per_value=1)
        gates = torch.sigmoid(self.mu * self.plan.parameter_scale + self._gate_terms(value))
        product = apply_rems(value, rems, mask).transpose(1, 2)
        softmax = take_heads(attention, self.plan.heads, dim=2)
        return put_heads(attention, softmax.lerp(product, gates), self.plan.heads)

    def _gate_terms(self, value: Tensor) -> Tensor:
        """What is added to μ, [B, T, R, 1]."""
        return torch.einsum("bhtd,hd->bth", take_heads(value, self.plan.heads, dim=1), self.w)[..., None]


class ChannelGates(TokenGates):
    """The control of token gates, RSA heads with a gate for each channel instead: g_d = σ(μ + w_d)."""

    def _gate_terms(self, value: Tensor) -> Tensor:
        return self.w


class TwoRems(RSAHeads):
    """RSA heads with a second REM for each: (1 − g′) RSA(X) + g′ P′ V.

    Args:
        heads: the RSA heads to replace.
        plan: of the second REMs and their gates.
    """

    def __init__(self, heads: RSAHeads, plan: LayerSpec) -> None:
        super().__init__(heads.plan)
        self.second = RSAHeads(plan)

    def forward(self, attention: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:  # type: ignore[override]  # no shards
        """Mix P V and P′ V into attention [B, T, H, D]."""
        mixed: Tensor = self.second(super().forward(attention, value, mask), value, mask)
        return mixed


class LearnedLags(RSAHeads):
    """RSA heads whose f(τ) is a learned weight for each head and lag, initialised from the REM.

    Gates learn at the rate of RSA parameters, the lag weights at that of the other weights.

    Args:
        heads: the RSA heads to replace.
        longest: the longest lag; f is 0 beyond.
    """

    def __init__(self, heads: RSAHeads, longest: int) -> None:
        plan: LayerSpec = heads.plan
        super().__init__(plan)
        decay, theta = heads.per_head(heads.rates())
        lags = torch.arange(1, longest + 1)
        f = [
            lag_weights(kind, decay[r], theta[r], lags, dilation)
            for r, (kind, dilation) in enumerate(zip(plan.kinds, plan.dilations, strict=True))
        ]
        self.eta = self.nu = self.theta = None
        self.f = nn.Parameter(torch.stack(f).detach())

    def forward(self, attention: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:  # type: ignore[override]  # no shards
        """Mix P V into attention [B, T, H, D]."""
        R, longest = self.f.shape
        product = (_convolved if longest == KERNEL else _multiplied)(self.f, take_heads(value, self.plan.heads, dim=1))
        return mix(attention, product, torch.sigmoid(self.mu * self.plan.parameter_scale).expand(R), self.plan.heads)


class WithoutRecurrence(RSAHeads):
    """RSA heads with P = 0, which replace others."""

    def __init__(self, heads: RSAHeads) -> None:
        super().__init__(heads.plan)
        self.eta = self.nu = self.theta = None

    def forward(self, attention: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:  # type: ignore[override]  # no shards
        """Attention [B, T, H, D], its RSA heads scaled by 1 − σ(μ)."""
        kept = 1 - torch.sigmoid(self.mu * self.plan.parameter_scale)
        scaled = kept[:, None] * take_heads(attention, self.plan.heads, dim=2)
        return put_heads(attention, scaled.to(attention.dtype), self.plan.heads)


def _multiplied(f: Tensor, value: Tensor) -> Tensor:
    """P V with a dense P."""
    T = value.shape[2]
    position = torch.arange(T, device=value.device)
    lag = position[:, None] - position
    longest = f.shape[1]
    return torch.where((lag > 0) & (lag <= longest), f[:, (lag - 1).clamp(0, longest - 1)], 0) @ value


def _convolved(f: Tensor, value: Tensor) -> Tensor:
    """P V lag by lag, cheaper for few lags."""
    T, longest = value.shape[2], f.shape[1]
    padded = nn.functional.pad(value, (0, 0, longest, 0))
    product = torch.zeros_like(value)
    for lag in range(1, longest + 1):
        product = product + f[:, lag - 1, None, None] * padded[:, :, longest - lag :][:, :, :T]
    return product
