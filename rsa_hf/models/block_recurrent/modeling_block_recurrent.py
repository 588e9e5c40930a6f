r"""The Block-Recurrent Transformer (Hutchins et al., 2022, arXiv:2203.07852), to be read alongside section 3.

Notation: B rows, T tokens of a segment, C positions of memory before it, W tokens of a window, N state vectors, H
heads of width D.

Windows (section 3.1). A text is cut into windows of W tokens, counted from its beginning, and a token sees the last W
positions, its own included. The score of a query and a key at distance i has a learned bias, shared by the distances
of a bucket, as in T5. This attention goes through transformers' attention interface with a boolean mask, which RSA
heads read too: their P reaches into the memory and sees the same W positions.

Recurrence (sections 3.2 to 3.4). A recurrent layer carries N state vectors from window to window. Within a window,
with the states at its beginning:

    vertical    tokens attend to tokens and to states; the heads of both, concatenated, are projected to y
    horizontal  states attend to states and to tokens; the heads of both, concatenated, are the input h of a gate

A token sees the same tokens as in every other layer; a state sees its whole window and the window before. Both
directions use the same keys and values of tokens, and the same keys and values of states; their queries differ, so
there are four kinds of queries. A learned vector (state id) is added to each state; without it, all states would learn
the same. Queries and keys share no time axis here, so this attention does not use the interface and has no RSA heads.

Gates replace residual connections, c' = next(c, h):

    fixed   z = W_z h + b_z           g = σ(b_g)                                        c' = c ⊙ g + z ⊙ (1 − g)
    lstm    z = tanh(W_z h + b_z)     i = σ(W_i h + b_i − 1),  f = σ(W_f h + b_f + 1)   c' = c ⊙ f + z ⊙ i

With the authors' initialisation (google-research/meliad), the fixed gate starts at about a half. W_i and W_f have a
tenth of the usual variance, so −1 and +1 dominate at first: f ≈ 0.73, i ≈ 0.27.

Segments may begin and end anywhere. The memory holds the positions of the unfinished window, preceded by a full window
if there is one; so C < 2W, and C determines where windows begin. States are updated at the end of each window,
wherever segments end. So the result does not depend on how a text is cut into segments.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.utils.output_capturing import capture_outputs

from rsa_hf.models import segments
from rsa_hf.models.block_recurrent.configuration_block_recurrent import BlockRecurrentConfig
from rsa_hf.models.interface_attention import InterfaceAttention, visibility

__all__ = ["BlockRecurrentForCausalLM", "BlockRecurrentForSequenceClassification", "BlockRecurrentModel"]


class Window(NamedTuple):
    """The part of a segment that lies within one window: t tokens, and the S keys that they and their states see."""

    tokens: slice  # of the segment
    keys: slice  # of memory and segment, from the start of the window before
    visible: Tensor  # which keys each token sees, [B or 1, 1, t, S]
    buckets: Tensor  # of the distances, [t, S]
    real: Tensor | None  # False for keys that are padding, [B, S]; None: there is no padding
    full: bool  # whether the window ends with these tokens


def cut_into_windows(
    config: BlockRecurrentConfig, T: int, C: int, attention_mask: Tensor | None, device: torch.device
) -> list[Window]:
    """Cut a segment of T tokens, preceded by C positions of memory. The attention mask is as for `visibility`."""
    W = config.window_size
    # Windows of equal shape share their tensors, so that a mask is built and read once.
    shared: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    windows = []
    for start in range(C - C % W, C + T, W):
        begin, end = max(start, C), min(start + W, C + T)
        keys = slice(max(0, start - W), end)
        t, S = end - begin, keys.stop - keys.start
        if (t, S) not in shared:
            distances = S - t + torch.arange(t, device=device)[:, None] - torch.arange(S, device=device)
            # Keys after the query, which it never sees, are in bucket 0.
            buckets = T5Attention._relative_position_bucket(
                -distances, False, config.relative_attention_num_buckets, config.relative_attention_max_distance
            )
            shared[t, S] = visibility(t, S - t, W, None, device), buckets
        visible, buckets = shared[t, S]
        real = None
        if attention_mask is not None:
            seen = attention_mask[:, : attention_mask.shape[1] - (C + T - end)]
            # Without a window, the last of S queries sees all keys that are not padding.
            real = visibility(1, S - 1, None, seen, device)[:, 0, 0]
            visible = visible & real[:, None, None]
        windows.append(Window(slice(begin - C, end - C), keys, visible, buckets, real, end == start + W))
    return windows


def extend_cache(key: Tensor, value: Tensor, cache: Tensor | None, window_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of memory, [B, 2, H, C, D], and segment, [B, H, T, D]; and the next cache, with gradient."""
    if cache is not None:
        key, value = torch.cat([cache[:, 0], key], dim=2), torch.cat([cache[:, 1], value], dim=2)
    length = key.shape[2]
    kept = length if length < window_size else window_size + length % window_size
    return key, value, torch.stack([key[:, :, length - kept :], value[:, :, length - kept :]], dim=1)


class RelativeBias(nn.Embedding):
    """A learned bias of the scores for each bucket of distances and each head."""

    def forward(self, buckets: Tensor) -> Tensor:
        """[t, S] → [1, H, t, S]."""
        return super().forward(buckets).permute(2, 0, 1)[None]


class WindowAttention(InterfaceAttention):
    """Self-attention of tokens, window by window."""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        inner = config.n_head * config.d_head
        super().__init__(config, config.n_head, inner, config.dropatt)
        self.qkv_proj = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.o_proj = nn.Linear(inner, config.d_model, bias=False)
        self.relative_bias = RelativeBias(config.relative_attention_num_buckets, config.n_head)

    def forward(
        self, hidden: Tensor, cache: Tensor | None, windows: list[Window], state: None = None
    ) -> tuple[Tensor, Tensor, None]:
        """As `RecurrentAttention.forward`, without a state."""
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (3, *self.heads)).permute(2, 0, 3, 1, 4)
        key, value, cache = extend_cache(key, value, cache, self.config.window_size)
        outputs = [
            self.attend(
                query[:, :, window.tokens],
                key[:, :, window.keys],
                value[:, :, window.keys],
                window.visible,
                position_bias=self.relative_bias(window.buckets),
            )[0]
            for window in windows
        ]
        return self.o_proj(torch.cat(outputs, dim=1)), cache, None


class FixedGate(nn.Module):
    """A running mean with a learned rate for each channel."""

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
    """W_i and W_f, which are initialised differently from other linear layers."""


class LSTMGate(nn.Module):
    """Input and forget gate of an LSTM, which depend only on h."""

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

    def projections(self, state: Tensor) -> Tensor:
        """From states, [B, N, d_model], to their queries to states and to tokens, keys and values, [4, B, H, N, D]."""
        projected = self.qqkv_proj(self.norm(state) + self.state_ids)
        return cast(Tensor, projected.unflatten(-1, (4, self.n_head, -1)).permute(2, 0, 3, 1, 4))

    def forward(self, state: Tensor, heads: Tensor) -> Tensor:
        """The next states, from the states [B, N, d_model] and the outputs of their attention, [B, N, 2 · H · D]."""
        if self.cell != "single":
            state = heads = self.attn_gate(state, heads)
        if self.cell == "skip":
            return state
        if self.cell == "dual":
            heads = self.ff_norm(heads)
        return cast(Tensor, self.ff_gate(state, self.ff_in(heads).relu()))


class RecurrentAttention(nn.Module):
    """Attention of the recurrent layer, in both directions."""

    is_cross_attention = True  # without RSA heads

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.n_head * config.d_head
        self.qqkv_proj = nn.Linear(config.d_model, 4 * inner, bias=False)
        self.o_proj = nn.Linear(2 * inner, config.d_model, bias=False)
        self.relative_bias = RelativeBias(config.relative_attention_num_buckets, config.n_head)
        self.states = StateCell(config)

    def forward(
        self, hidden: Tensor, cache: Tensor | None, windows: list[Window], state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend window by window, and update the states after each full window.

        `hidden` is the segment, normalised, [B, T, d_model]. `cache` holds keys and values of the memory,
        [B, 2, H, C, D], and `state` the states at the beginning of the segment's first window, [B, N, d_model] (None:
        the learned ones). Returns the output, [B, T, d_model], the next cache and the next state, with gradient.
        """
        config, dropatt = self.config, self.config.dropatt if self.training else 0.0
        if state is None:
            state = self.states.initial_state.expand(len(hidden), -1, -1)
        projected = self.qqkv_proj(hidden).unflatten(-1, (4, config.n_head, -1))
        query, query_states, key, value = projected.permute(2, 0, 3, 1, 4)
        key, value, cache = extend_cache(key, value, cache, config.window_size)
        outputs = []
        for window in windows:
            from_states, from_tokens, state_key, state_value = self.states.projections(state)
            bias = self.relative_bias(window.buckets)
            bias = bias.masked_fill(~window.visible, torch.finfo(bias.dtype).min)
            keys, values = key[:, :, window.keys], value[:, :, window.keys]
            to_tokens, to_states = query[:, :, window.tokens], query_states[:, :, window.tokens]
            vertical = (
                F.scaled_dot_product_attention(to_tokens, keys, values, bias, dropatt),
                F.scaled_dot_product_attention(to_states, state_key, state_value, None, dropatt),
            )
            outputs.append(_concatenated(*vertical))
            if not window.full:
                continue
            seen, real = None, None
            if window.real is not None:  # a row of only padding has nothing to attend to and keeps its state
                real = window.real.any(dim=1, keepdim=True)
                seen = (window.real | ~real)[:, None, None]
            horizontal = (
                F.scaled_dot_product_attention(from_states, state_key, state_value),
                F.scaled_dot_product_attention(from_tokens, keys, values, seen),
            )
            moved: Tensor = self.states(state, _concatenated(*horizontal))
            state = moved if real is None else torch.where(real[..., None], moved, state)
        return self.o_proj(torch.cat(outputs, dim=1)), cache, state


def _concatenated(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], dim=1).transpose(1, 2).flatten(2)


class BlockRecurrentLayer(GradientCheckpointingLayer):
    """Attention, recurrent or not, and a feed-forward layer."""

    def __init__(self, config: BlockRecurrentConfig, layer_idx: int) -> None:
        super().__init__()
        d_model, epsilon = config.d_model, config.layer_norm_epsilon
        self.attn_norm = nn.RMSNorm(d_model, eps=epsilon)
        recurrent = layer_idx in config.recurrent_places
        self.attn = RecurrentAttention(config) if recurrent else WindowAttention(config)
        self.ff_norm = nn.RMSNorm(d_model, eps=epsilon)
        self.ff_in = nn.Linear(d_model, config.d_inner, bias=False)
        self.ff_out = nn.Linear(config.d_inner, d_model, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, cache: Tensor | None, windows: list[Window], state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `RecurrentAttention.forward`, or `WindowAttention.forward`."""
        output, cache, state = self.attn(self.attn_norm(hidden), cache, windows, state)
        hidden = hidden + self.drop(output)
        return hidden + self.drop(self.ff_out(self.ff_in(self.ff_norm(hidden)).relu())), cache, state


class BlockRecurrentPreTrainedModel(segments.SegmentPreTrainedModel):
    """Base class: initialisation, and attributes that differ from those of other models with a state."""

    config_class = BlockRecurrentConfig
    config: BlockRecurrentConfig
    segment_state = "mems"
    _input_embed_layer = "embed_tokens"
    _no_split_modules = ["BlockRecurrentLayer"]  # noqa: RUF012  (transformers' own type)
    _can_record_outputs = {"hidden_states": BlockRecurrentLayer}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in the authors' program: variance 1 / width, except for gates and states (see above)."""
        if isinstance(module, GateLinear):
            init.trunc_normal_(module.weight, std=(0.1 / module.in_features) ** 0.5)
            init.normal_(module.bias, std=0.1)
        elif isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RelativeBias):
            init.normal_(module.weight, std=module.num_embeddings**-0.5)
        elif isinstance(module, nn.Embedding):
            # Tied logits then have variance 1.
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, FixedGate):
            init.normal_(module.bias, std=0.1)
        elif isinstance(module, StateCell):
            init.normal_(module.initial_state, std=0.1)
            init.normal_(module.state_ids, std=1.0)


class BlockRecurrentModel(BlockRecurrentPreTrainedModel):
    """The Block-Recurrent Transformer without a head."""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__(config)
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(BlockRecurrentLayer(config, i) for i in range(config.n_layer))
        self.norm = nn.RMSNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.drop = nn.Dropout(config.dropout)
        self.post_init()  # type: ignore[no-untyped-call]

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> segments.SegmentOutput:
        """Hidden states of a segment.

        For the arguments, see `rsa_hf.models.segments`. Windows count padding: before a text, it changes nothing if
        its length is a multiple of W; after a text, it never does. The state is the keys and values of each layer at
        the last C < 2W positions, [B, 2, H, C, D]; then the states of each recurrent layer, [B, N, d_model].
        """
        config, L = self.config, self.config.n_layer
        hidden = self.embed(self.embed_tokens, input_ids, inputs_embeds)
        B, T = hidden.shape[:2]
        caches, states, C = list[Tensor | None]([None] * L), dict[int, Tensor](), 0
        if mems is not None:
            # A longer memory comes from another window_size, and is refused.
            C = min(mems[0].shape[-2], 2 * config.window_size - 1)
            cache, state = (B, 2, config.n_head, C, config.d_head), (B, config.num_state_vectors, config.d_model)
            segments.require_shapes("mems", mems, [cache] * L + [state] * len(config.recurrent_places))
            caches, states = list(mems[:L]), dict(zip(config.recurrent_places, mems[L:], strict=True))
        windows = cut_into_windows(config, T, C, attention_mask, hidden.device)
        hidden = self.drop(hidden)
        next_caches, next_states = [], []
        for i, layer in enumerate(self.layers):
            hidden, cache, state = layer(hidden, caches[i], windows, states.get(i))
            # Not detached in the layer: reentrant checkpointing makes everything a layer returns require a gradient.
            next_caches.append(cache.detach())
            if state is not None:
                next_states.append(state.detach())
        use_cache = config.use_cache if use_cache is None else use_cache
        return segments.SegmentOutput(
            last_hidden_state=self.drop(self.norm(hidden)), mems=(*next_caches, *next_states) if use_cache else None
        )


class BlockRecurrentForCausalLM(BlockRecurrentPreTrainedModel, segments.SegmentForCausalLM):
    """The Block-Recurrent Transformer with a softmax over the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (as transformers declares it)


class BlockRecurrentForSequenceClassification(
    BlockRecurrentPreTrainedModel, segments.SegmentForSequenceClassification
):
    """The Block-Recurrent Transformer with a linear classifier on the last token that is not padding."""
