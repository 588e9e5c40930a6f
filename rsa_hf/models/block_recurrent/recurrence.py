r"""The recurrent layer (Hutchins et al., 2022, sections 3.2 to 3.4), to be read beside the paper.

It carries N state vectors from window to window. Within a window, e are its tokens and s the states at its beginning:

    vertical    tokens attend to tokens, and to states; the heads of both, side by side, are projected to y
    horizontal  states attend to states, and to tokens; the heads of both, side by side, are h of a gate

A token sees the positions that it sees in every layer, a state all of its window and the window before, as those are
the keys at hand. Keys and values of tokens are the same for both directions, and those of states; queries are not, so
that there are four kinds. A vector of its own (state id) is added to each state, or all would learn the same.

Gates take the place of residual connections, c' = next(c, h):

    fixed   z = W_z h + b_z           g = σ(b_g)                                        c' = c ⊙ g + z ⊙ (1 − g)
    lstm    z = tanh(W_z h + b_z)     i = σ(W_i h + b_i − 1),  f = σ(W_f h + b_f + 1)   c' = c ⊙ f + z ⊙ i

They start as the authors' program (google-research/meliad) has them: all b of gates normal with standard deviation
0.1, so that the fixed gate starts at about a half; W_i and W_f with a tenth of the usual variance, so that −1 and +1
are what counts at first: f ≈ 0.73, i ≈ 0.27. The first state is learned, from 0.1 · N(0, 1); state ids from N(0, 1).

A window that is not full has the state of its beginning; states move on where it ends, wherever segments end. So the
cut of a text into segments changes nothing, and a token is generated with the numbers that it has in one long text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsa_hf.models.block_recurrent.attention import RelativeBias, behind_cache, split_heads
from rsa_hf.models.block_recurrent.configuration import BlockRecurrentConfig
from rsa_hf.models.block_recurrent.windows import Window

__all__ = ["FixedGate", "GateLinear", "RecurrentAttention", "StateCell"]


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
    """W_i and W_f: a class of its own, as it starts in its own way."""


class LSTMGate(nn.Module):
    """Input and forget gate of an LSTM, without recurrence of their own."""

    def __init__(self, width: int, d_model: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, d_model)
        self.gates = GateLinear(width, 2 * d_model)

    def forward(self, state: Tensor, h: Tensor) -> Tensor:
        """From c [B, N, d_model] and h [B, N, width] to c' [B, N, d_model]."""
        z: Tensor = self.input(h).tanh()
        i_and_f: Tensor = self.gates(h)
        i, f = i_and_f.split(z.shape[-1], dim=-1)
        next_state: Tensor = state * (f + 1).sigmoid() + z * (i - 1).sigmoid()
        return next_state


class StateCell(nn.Module):
    """The states' side of the layer: what tokens see of them, and their update."""

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
        """Queries to states, queries to tokens, keys and values of states [B, N, d_model]: each [B, H, N, D]."""
        return split_heads(self.qqkv_proj(self.norm(state) + self.state_ids), self.n_head, 4)

    def forward(self, state: Tensor, heads: Tensor) -> Tensor:
        """The next states.

        Args:
            state: [B, N, d_model].
            heads: what states attend to, of states and of tokens, [B, N, 2 · H · D].
        """
        if self.cell != "single":
            state = heads = self.attn_gate(state, heads)
        if self.cell == "skip":
            return state
        if self.cell == "dual":
            heads = self.ff_norm(heads)
        next_state: Tensor = self.ff_gate(state, self.ff_in(heads).relu())
        return next_state


class RecurrentAttention(nn.Module):
    """Attention of the recurrent layer, both ways.

    It does not go through transformers' attention interface: queries and keys are not on one time axis here, so that
    RSA heads have no place.
    """

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.n_head * config.d_head
        self.qqkv_proj = nn.Linear(config.d_model, 4 * inner, bias=False)
        self.o_proj = nn.Linear(2 * inner, config.d_model, bias=False)
        self.relative_bias = RelativeBias(config)
        self.states = StateCell(config)

    def forward(
        self, hidden: Tensor, cache: Tensor | None, windows: list[Window], state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens attend window by window, and states move on behind each window.

        Args:
            hidden: the segment, normalised, [B, T, d_model].
            cache: keys and values before it, [B, 2, H, C, D].
            windows: of the segment.
            state: at the beginning of the window in which the segment begins, [B, N, d_model]; None: of the text.

        Returns:
            [B, T, d_model]; the next cache and the next state, with gradient.
        """
        config, dropatt = self.config, self.config.dropatt if self.training else 0.0
        if state is None:
            state = self.states.initial_state.expand(len(hidden), -1, -1)
        query, query_states, key, value = split_heads(self.qqkv_proj(hidden), config.n_head, 4)
        key, value, cache = behind_cache(key, value, cache, config.window_size)
        outputs = []
        for window in windows:
            from_states, from_tokens, state_key, state_value = self.states.projections(state)
            bias = self.relative_bias(window)
            bias = bias.masked_fill(~window.visible, torch.finfo(bias.dtype).min)
            keys, values = key[:, :, window.keys], value[:, :, window.keys]
            vertical = (
                F.scaled_dot_product_attention(query[:, :, window.tokens], keys, values, bias, dropatt),
                F.scaled_dot_product_attention(
                    query_states[:, :, window.tokens], state_key, state_value, None, dropatt
                ),
            )
            outputs.append(_side_by_side(*vertical))
            if not window.full:
                continue
            # A row of padding alone has nothing to attend to, and its state stays as it is.
            real = None if window.real is None else window.real.any(dim=1, keepdim=True)
            seen = None if window.real is None or real is None else (window.real | ~real)[:, None, None]
            horizontal = (
                F.scaled_dot_product_attention(from_states, state_key, state_value),
                F.scaled_dot_product_attention(from_tokens, keys, values, seen),
            )
            moved: Tensor = self.states(state, _side_by_side(*horizontal))
            state = moved if real is None else torch.where(real[..., None], moved, state)
        return self.o_proj(torch.cat(outputs, dim=1)), cache, state


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Heads of two attentions, each [B, H, T, D]: [B, T, 2 · H · D]."""
    return torch.cat([first, second], dim=1).transpose(1, 2).flatten(2)
