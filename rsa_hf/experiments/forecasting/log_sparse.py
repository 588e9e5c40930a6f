"""A Transformer in the style of LogSparse (Li et al., 2019): GPT-2 with convolved queries and keys, and sparse lags.

Position t attends to itself and to t − 1, t − 2, t − 4, t − 8, …; queries and keys are causal convolutions over the
last few positions. RSA heads see all of the past in their recurrence: P has no gaps between the powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from rsa_hf.ops.mask import HIDDEN_AT_OR_BELOW

__all__ = ["LogSparseModel"]

KERNEL = 6
# A bias on the scores that leaves nothing of their softmax, and yet is no mask, which would go for P too.
NOT_ATTENDED = HIDDEN_AT_OR_BELOW / 2


class LogSparseModel(GPT2Model):
    """GPT-2 without a head, with LogSparse's attention.

    Args:
        config: of GPT-2; `n_positions` is the longest sequence.
    """

    lag_bias: Tensor

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        for block in self.h:
            attention = block.get_submodule("attn")
            attention.c_attn = ConvolvedProjection(config.n_embd)
        position = torch.arange(config.n_positions)
        lag = position[:, None] - position
        attended = (lag >= 0) & (lag & (lag - 1) == 0)  # 0 and the powers of two
        bias = torch.where(attended, 0.0, NOT_ATTENDED).masked_fill(lag < 0, torch.finfo(torch.float32).min)
        self.register_buffer("lag_bias", bias[None, None], persistent=False)

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **keywords: Any) -> Any:
        """As `GPT2Model.forward`, without cache and mask."""
        T = (keywords["input_ids"] if inputs_embeds is None else inputs_embeds).shape[1]
        keywords |= {"attention_mask": self.lag_bias[:, :, :T, :T], "use_cache": False}
        return super().forward(*args, inputs_embeds=inputs_embeds, **keywords)


class ConvolvedProjection(nn.Module):
    """Queries and keys as causal convolutions, values as a linear map.

    Args:
        width: of the input, [B, T, width].
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, 2 * width, KERNEL)
        self.value = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Queries, keys and values, [B, T, 3 · width]."""
        padded = nn.functional.pad(hidden.transpose(1, 2), (KERNEL - 1, 0))
        return torch.cat([self.convolution(padded).transpose(1, 2), self.value(hidden)], dim=-1)
