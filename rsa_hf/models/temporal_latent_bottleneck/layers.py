"""The layers of both streams: attention with residual, then a feed-forward layer, each on normalised inputs.

Notation: B rows, T queries, S keys, H heads of width D, n = H·D; N state vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rsa_hf.models.temporal_latent_bottleneck.configuration import TemporalLatentBottleneckConfig

__all__ = ["CrossLayer", "FastLayer", "merged"]


def merged(earlier: Tensor | None, new: Tensor, is_earlier: Tensor | None) -> Tensor:
    """What is in the slots of a chunk: tokens of earlier segments, then those of this one.

    Args:
        earlier: [B, …, M, D], of the first M slots; what a row has not filled of them means nothing. None: nothing.
        new: [B, …, T, D], of the last T of the S slots.
        is_earlier: [B, S], which slots earlier segments have filled; None with `earlier`.

    Returns:
        [B, …, S, D].
    """
    if earlier is None or is_earlier is None:
        return new
    B, S = is_earlier.shape
    chosen = is_earlier.view(B, *[1] * (new.dim() - 3), S, 1)
    earlier, new = F.pad(earlier, (0, 0, 0, S - earlier.shape[-2])), F.pad(new, (0, 0, S - new.shape[-2], 0))
    return torch.where(chosen, earlier.to(new.dtype), new)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out: output [B, T, H, D] and weights [B, H, T, S]."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class SelfAttention(nn.Module):
    """Causal attention within a chunk: the one place of this model where RSA heads belong."""

    is_causal = True

    def __init__(self, config: TemporalLatentBottleneckConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, visible: Tensor, earlier: Tensor | None, is_earlier: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to what the chunk holds so far.

        Args:
            hidden: [B, T, n], the tokens in the last T of S slots.
            visible: [1, 1, T, S], boolean.
            earlier: keys and values of the tokens of earlier segments, [B, 2, H, M, D].
            is_earlier: as of `merged`.

        Returns:
            [B, T, n], and the keys and values of all S slots, [B, 2, H, S, D].
        """
        heads = self.config.num_attention_heads
        query, key, value = self.qkv(hidden).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        keys_values = merged(earlier, torch.stack([key, value], dim=1), is_earlier)
        return self.out(_attend(self, query, keys_values[:, 0], keys_values[:, 1], visible)), keys_values


class CrossAttention(nn.Module):
    """Attention of one stream to the other. It has no common axis of time, so it is never patched."""

    is_causal = False

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key_value = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        """[B, T, n] and the other stream's [B, S, n] → [B, T, n]."""
        heads = self.config.num_attention_heads
        query = self.query(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
        key, value = self.key_value(other).unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        return cast(Tensor, self.out(_attend(self, query, key, value, None)))


def _attend(
    module: SelfAttention | CrossAttention, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None
) -> Tensor:
    """Through transformers' attention interface: [B, H, T, D] → [B, T, n]."""
    config = module.config
    attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
        config._attn_implementation, eager_attention_forward
    )
    output, _ = attention(
        module,
        query,
        key,
        value,
        visible,
        scaling=(config.hidden_size // config.num_attention_heads) ** -0.5,
        dropout=config.attention_dropout if module.training else 0.0,
    )
    return output.flatten(2)


class FeedForward(nn.Sequential):
    """Layer normalisation, and two linear layers at each position."""

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__(
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
            nn.Linear(config.hidden_size, config.intermediate_size),
            nn.GELU(),
            nn.Linear(config.intermediate_size, config.hidden_size),
            nn.Dropout(config.dropout),
        )


class CrossLayer(nn.Module):
    """CROSS ATTENTION + FFN of the paper: one stream takes from the other."""

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.other_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = CrossAttention(config)
        self.drop = nn.Dropout(config.dropout)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        """[B, T, n] and the other stream's [B, S, n] → [B, T, n]."""
        hidden = hidden + self.drop(self.attention(self.norm(hidden), self.other_norm(other)))
        return cast(Tensor, hidden + self.feed_forward(hidden))


class FastLayer(GradientCheckpointingLayer):
    """SELF ATTENTION + FFN of the paper and, behind every R-th, CROSS ATTENTION + FFN to the states."""

    def __init__(self, config: TemporalLatentBottleneckConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config, layer_idx)
        self.drop = nn.Dropout(config.dropout)
        self.feed_forward = FeedForward(config)
        is_last_of_R = (layer_idx + 1) % config.cross_attention_every == 0
        self.cross = CrossLayer(config) if is_last_of_R else None

    def forward(
        self, hidden: Tensor, states: Tensor, visible: Tensor, earlier: Tensor | None, is_earlier: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `SelfAttention.forward`, with the states [B, N, n]."""
        attended, keys_values = self.attention(self.norm(hidden), visible, earlier, is_earlier)
        hidden = hidden + self.drop(attended)
        hidden = hidden + self.feed_forward(hidden)
        return hidden if self.cross is None else self.cross(hidden, states), keys_values
