"""The state vectors of the Block-Recurrent Transformer and their update (see modeling_block_recurrent.py).

Notation: B rows, T tokens, N state vectors, H heads of width D.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from rsa_hf.models.block_recurrent.configuration_block_recurrent import BlockRecurrentConfig

__all__ = ["FixedGate", "GateLinear", "StateCell", "split_heads"]


def split_heads(x: Tensor, n_head: int, parts: int) -> tuple[Tensor, ...]:
    """Split concatenated queries, keys, values, …, [B, T, parts · H · D], into `parts` tensors [B, H, T, D]."""
    return tuple(part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in x.chunk(parts, dim=-1))


class FixedGate(nn.Module):
    """A running mean, whose rate is learned for each channel."""

    def __init__(self, width: int, d_model: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, d_model)
        self.bias = nn.Parameter(torch.empty(d_model))

    def forward(self, state: Tensor, h: Tensor) -> Tensor:
        """From c [B, N, d_model] and h [B, N, width] to c' [B, N, d_model]."""
        z: Tensor = self.input(h)
        g = self.bias.sigmoid()
        return state * g + z * (1 - g)


class GateLinear(nn.Linear):
    """W_i and W_f; a class of its own, because they are initialised differently."""


class LSTMGate(nn.Module):
    """Input and forget gate of an LSTM, which depend on h alone."""

    def __init__(self, width: int, d_model: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, d_model)
        self.gates = GateLinear(width, 2 * d_model)

    def forward(self, state: Tensor, h: Tensor) -> Tensor:
        """From c [B, N, d_model] and h [B, N, width] to c' [B, N, d_model]."""
        z: Tensor = self.input(h).tanh()
        i, f = self.gates(h).chunk(2, dim=-1)
        return cast(Tensor, state * (f + 1).sigmoid() + z * (i - 1).sigmoid())


class StateCell(nn.Module):
    """The states' side of the recurrent layer: their projections, and their update."""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__()
        self.n_head, self.cell = config.n_head, config.cell
        d_model, inner = config.d_model, config.n_head * config.d_head
        gate = FixedGate if config.gate == "fixed" else LSTMGate
        self.initial_state = nn.Parameter(torch.empty(config.num_state_vectors, d_model))
        self.state_ids = nn.Parameter(torch.empty(config.num_state_vectors, d_model))
        self.norm = nn.RMSNorm(d_model, eps=config.layer_norm_epsilon)
        self.qqkv_proj = nn.Linear(d_model, 4 * inner, bias=False)
        if config.cell != "single":
            self.attn_gate = gate(2 * inner, d_model)
        if config.cell == "dual":
            self.ff_norm = nn.RMSNorm(d_model, eps=config.layer_norm_epsilon)
        if config.cell != "skip":
            self.ff_in = nn.Linear(d_model if config.cell == "dual" else 2 * inner, config.d_inner, bias=False)
            self.ff_gate = gate(config.d_inner, d_model)

    def projections(self, state: Tensor) -> tuple[Tensor, ...]:
        """Queries to states, queries to tokens, keys and values of states [B, N, d_model], [B, H, N, D] each."""
        return split_heads(self.qqkv_proj(self.norm(state) + self.state_ids), self.n_head, 4)

    def forward(self, state: Tensor, heads: Tensor) -> Tensor:
        """The next states, from the states [B, N, d_model] and the outputs of their attention, [B, N, 2 · H · D]."""
        if self.cell != "single":
            state = heads = self.attn_gate(state, heads)
        if self.cell == "skip":
            return state
        if self.cell == "dual":
            heads = self.ff_norm(heads)
        return cast(Tensor, self.ff_gate(state, self.ff_in(heads).relu()))
