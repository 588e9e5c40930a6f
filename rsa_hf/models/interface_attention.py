"""Attention that several models share.

Notation: B rows, T queries, M positions of memory, S = M + T keys, H heads of width D.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class InterfaceAttention(nn.Module):
    """Base of modules that compute attention through transformers' interface, where RSA heads are mixed in."""

    is_causal = True
    positions_are_slots = True  # of memory and segment together, padding too

    def __init__(self, config: Any, num_heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.config, self.attention_dropout = config, dropout
        self.heads = (num_heads, width // num_heads)
        self.scaling = self.heads[1] ** -0.5

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by the implementation that the config names.

        `query` is [B, H, T, D]; `key` and `value` are [B, H, S, D]; `visible`, [B or 1, 1, T, S], says which keys each
        query sees (None: all). The option `position_bias` is added to the scores. Returns the concatenated outputs of
        the heads, [B, T, H · D], and the weights, [B, H, T, S], or None.
        """
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attention(self, query, key, value, visible, scaling=self.scaling, dropout=dropout, **options)
        return output.flatten(2), weights


def sinusoids(distances: Tensor, width: int) -> Tensor:
    """Sinusoidal position encodings, sines first, of wavelengths 2π … 10000·2π: [N] → [N, width], float32."""
    # Explicitly float32: the process's default dtype changes while another thread loads a model.
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=distances.device)
    frequencies = 10000.0 ** (-steps / width)
    angles = distances.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def next_memory(memory: Tensor, hidden: Tensor, length: int) -> Tensor:
    """The memory for the next segment: the last M ≤ `length` of memory and inputs [B, T, n], without gradient."""
    inputs = torch.cat([memory, hidden], dim=1) if hidden.shape[1] < length else hidden
    return inputs[:, max(0, inputs.shape[1] - length) :].detach()


def visibility(T: int, M: int, window: int | None, attention_mask: Tensor | None, device: torch.device) -> Tensor:
    """Which keys each query sees, [B or 1, 1, T, S]: its own and earlier ones, within the window, without padding.

    A query sees the last `window` positions, its own included; None: all. `attention_mask`, [B, L], is 0 for padding:
    its last column is the last key, and keys before its first column are real.
    """
    S = M + T
    distance = M + torch.arange(T, device=device)[:, None] - torch.arange(S, device=device)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if attention_mask is None:
        return visible[None, None]
    real = attention_mask[:, -S:].bool()
    return visible & F.pad(real, (S - real.shape[1], 0), value=True)[:, None, None, :]


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out: output [B, T, H, D] and weights [B, H, T, S]."""
    scores = query @ key.transpose(2, 3) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights
