"""The attention of SRU++ (Lei, 2021), to be read beside the paper.

Rows are positions here, so matrices stand on the right. X are the layer's inputs, those of the memory before those of
the segment; queries are the segment's alone. For each head, of width D:

    Q = X W_qᵀ      K = Q W_kᵀ      V = Q W_vᵀ
    A = softmax(Q Kᵀ / √D) V
    U = layernorm(Q + α A) W_oᵀ

α starts at 0, so that a layer starts as a recurrence whose weights are the product W_o W_q of small matrices. RSA
heads mix into A, so their gates and rates get no gradient before α has moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rsa_hf.models.sru_plus_plus.configuration import SRUPlusPlusConfig

__all__ = ["SRUPlusPlusAttention"]


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out: output [B, T, H, D] and weights [B, H, T, S]."""
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    # Never below float32, and float64 stays as it is.
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class SRUPlusPlusAttention(nn.Module):
    """From a layer's inputs to U, which its recurrence needs."""

    is_causal = True

    def __init__(self, config: SRUPlusPlusConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        d, small = config.hidden_size, config.projection_size
        self.head_dim = small // config.num_attention_heads
        self.q_proj = nn.Linear(d, small, bias=False)
        self.kv_proj = nn.Linear(small, 2 * small, bias=False)  # W_k above W_v
        self.o_proj = nn.Linear(small, 3 * d, bias=False)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.layer_norm = nn.LayerNorm(small, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, memory: Tensor | None, visible: Tensor) -> tuple[Tensor, Tensor | None]:
        """U of a segment behind a memory.

        Args:
            hidden: the segment's inputs, [B, T, d].
            memory: those of the positions before it, [B, M, d].
            visible: who sees whom, [B or 1, 1, T, M + T].

        Returns:
            U, [B, T, 3d], and the attention weights, [B, H, T, M + T] or None.
        """
        B, T, _ = hidden.shape
        heads = (self.config.num_attention_heads, self.head_dim)
        Q = self.q_proj(hidden if memory is None else torch.cat([memory, hidden], dim=1))
        key, value = self.kv_proj(Q).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)
        Q = Q[:, -T:]
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        A, weights = attention(
            self,
            Q.unflatten(-1, heads).transpose(1, 2),
            key,
            value,
            visible,
            scaling=self.head_dim**-0.5,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(self.dropout(self.layer_norm(Q + self.alpha * A.reshape(B, T, -1)))), weights
