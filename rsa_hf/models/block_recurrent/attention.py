r"""Attention within windows, with a cache of the window before (Hutchins et al., 2022, section 3.1).

A token sees the W positions up to itself. The score of a query and a key at distance i has a learned bias b_i, shared
by the distances of a class, as in T5. It goes through transformers' attention interface with a boolean mask that says
who sees whom. RSA heads read that mask like any other: their P reaches into the cache, and sees the same W positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rsa_hf.models.block_recurrent.configuration import BlockRecurrentConfig
from rsa_hf.models.block_recurrent.windows import Window, remembered_length
from rsa_hf.models.transformer_xl.attention import eager_attention_forward

__all__ = ["RelativeBias", "WindowAttention", "behind_cache", "split_heads"]


def split_heads(x: Tensor, n_head: int, parts: int) -> tuple[Tensor, ...]:
    """Queries, keys, values, … side by side, [B, T, parts · H · D], as `parts` tensors [B, H, T, D]."""
    return tuple(part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in x.chunk(parts, dim=-1))


def behind_cache(key: Tensor, value: Tensor, cache: Tensor | None, window_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of memory and segment, and the next memory.

    Args:
        key: of the segment, [B, H, T, D].
        value: likewise.
        cache: keys and values of the C positions before, [B, 2, H, C, D].
        window_size: W.

    Returns:
        Keys and values [B, H, C + T, D]; the next cache, with gradient.
    """
    if cache is not None:
        key, value = torch.cat([cache[:, 0], key], dim=2), torch.cat([cache[:, 1], value], dim=2)
    first = key.shape[2] - remembered_length(key.shape[2], window_size)
    return key, value, torch.stack([key[:, :, first:], value[:, :, first:]], dim=1)


class RelativeBias(nn.Module):
    """A learned bias of the scores for each class of distances and head."""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.relative_attention_num_buckets, config.n_head))

    def forward(self, window: Window) -> Tensor:
        """Biases of a window's tokens and keys, [1, H, t, S]."""
        return self.weight[window.buckets].permute(2, 0, 1)[None]


class WindowAttention(nn.Module):
    """Self-attention of tokens, window by window."""

    is_causal = True

    def __init__(self, config: BlockRecurrentConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.d_head**-0.5
        inner = config.n_head * config.d_head
        self.qkv_proj = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.o_proj = nn.Linear(inner, config.d_model, bias=False)
        self.relative_bias = RelativeBias(config)

    def forward(
        self, hidden: Tensor, cache: Tensor | None, windows: list[Window], state: None = None
    ) -> tuple[Tensor, Tensor, None]:
        """One layer's attention.

        Args:
            hidden: the segment, normalised, [B, T, d_model].
            cache: keys and values before it, [B, 2, H, C, D].
            windows: of the segment.
            state: there is none.

        Returns:
            [B, T, d_model]; the next cache, with gradient; None.
        """
        config = self.config
        query, key, value = split_heads(self.qkv_proj(hidden), config.n_head, 3)
        key, value, cache = behind_cache(key, value, cache, config.window_size)
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            config._attn_implementation, eager_attention_forward
        )
        outputs = [
            attention(
                self,
                query[:, :, window.tokens],
                key[:, :, window.keys],
                value[:, :, window.keys],
                window.visible,
                position_bias=self.relative_bias(window),
                scaling=self.scaling,
                dropout=config.dropatt if self.training else 0.0,
            )[0]
            for window in windows
        ]
        return self.o_proj(torch.cat(outputs, dim=1).flatten(2)), cache, None
