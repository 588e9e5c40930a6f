r"""Attention with relative positions (Transformer-XL, Dai et al., 2019, section 3.3), to be read beside the paper.

Notation: B rows, T queries, M positions of memory, S = M + T keys, H heads of width D. Query t stands at position
M + t of the key axis; its distance to key s is M + t − s. The score of query t and key s is

    A[t, s] = (q_t + u)ᵀ k_s + (q_t + v)ᵀ r_{M + t − s}        r_i = W_r R_i, R_i sinusoids of the distance i

The first half is ordinary attention with queries q + u. The second is a bias on its scores, so attention goes through
transformers' attention interface (`position_bias`), with a boolean mask that says who sees whom. RSA heads read that
mask like any other, and so their P has T rows and S columns, and the window of `same_length`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rsa_hf.models.transformer_xl.configuration import TransformerXLConfig

__all__ = ["TransformerXLAttention", "eager_attention_forward", "relative_scores", "sinusoids", "visibility"]


def sinusoids(distances: Tensor, d_model: int) -> Tensor:
    """R: half sines, half cosines, of wavelengths 2π … 10000·2π. [N] → [N, d_model], float32."""
    # (float32 by name: the default dtype is another one while somebody in this process loads a model.)
    steps = torch.arange(0, d_model, 2, dtype=torch.float32, device=distances.device)
    frequencies = 10000.0 ** (-steps / d_model)
    angles = distances.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def relative_scores(query: Tensor, position: Tensor) -> Tensor:
    """Scores of each query with the position of each key (paper, appendix B), for the keys that it may see.

    Entry [t, s] of the result is entry [t, T − 1 − t + s] of the product with all distances, so row t is the product's
    shifted by T − 1 − t. With one distance more than there are keys, rows of S + 1 read as rows of S from entry T on
    are shifted so: a view, no copy.

    Args:
        query: q + v, shape [B, H, T, D].
        position: r of the distances S … 0, shape [H, S + 1, D].

    Returns:
        Shape [B, H, T, S]; where s > M + t it means nothing.
    """
    B, H, T, D = query.shape
    R = position.shape[1]
    scores = query.transpose(0, 1).reshape(H, B * T, D) @ position.transpose(1, 2)
    return scores.view(H, B, T * R)[..., T:].view(H, B, T, R - 1).transpose(0, 1)


def visibility(T: int, M: int, window: int | None, attention_mask: Tensor | None, device: torch.device) -> Tensor:
    """Which keys each query sees: itself and what is before it, within the window, but no padding.

    Args:
        T: number of queries.
        M: positions of memory before them.
        window: number of positions back that a query sees, itself included; None: all.
        attention_mask: shape [B, L], 0 for padding; its last column is the last key, and what is before its
            first is real.
        device: where to build it.

    Returns:
        Shape [B or 1, 1, T, S], boolean.
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
    attention_mask: Tensor,
    *,
    position_bias: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out: output [B, T, H, D] and weights [B, H, T, S]."""
    scores = query @ key.transpose(2, 3) * scaling + position_bias
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class TransformerXLAttention(nn.Module):
    """Attention over the memory and the segment with relative positions, with residual and layer normalisation."""

    is_causal = True

    def __init__(self, config: TransformerXLConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.d_head**-0.5
        inner = config.n_head * config.d_head
        self.qkv_net = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.r_net = nn.Linear(config.d_model, inner, bias=False)
        self.o_net = nn.Linear(inner, config.d_model, bias=False)
        self.drop = nn.Dropout(config.dropout)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        if config.untie_r:
            self.r_w_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.r_r_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))

    def forward(
        self, hidden: Tensor, memory: Tensor | None, positions: Tensor, visible: Tensor, biases: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """One layer's attention.

        Args:
            hidden: the segment, [B, T, d_model].
            memory: what the layer saw before it, [B, M, d_model].
            positions: R of the distances S … 0, [S + 1, d_model].
            visible: [B or 1, 1, T, S].
            biases: u and v where all layers share them, [H, D].

        Returns:
            [B, T, d_model], and the attention weights [B, H, T, S] or None.
        """
        B, T, _ = hidden.shape
        heads = (self.config.n_head, self.config.d_head)
        text = hidden if memory is None else torch.cat([memory, hidden], dim=1)
        text = self.layer_norm(text) if self.config.pre_lnorm else text
        query, key, value = self.qkv_net(text).unflatten(-1, (3, *heads)).permute(2, 0, 3, 1, 4)
        query = query[:, :, -T:]
        position = self.r_net(positions).unflatten(-1, heads).transpose(0, 1)
        u, v = (self.r_w_bias, self.r_r_bias) if self.config.untie_r else biases
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query + u[:, None],
            key,
            value,
            visible,
            position_bias=relative_scores((query + v[:, None]) * self.scaling, position),
            scaling=self.scaling,
            dropout=self.config.dropatt if self.training else 0.0,
        )
        hidden = hidden + self.drop(self.o_net(output.reshape(B, T, -1)))
        return hidden if self.config.pre_lnorm else self.layer_norm(hidden), weights
