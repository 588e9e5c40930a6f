r"""Temporal Latent Bottleneck (Didolkar et al., 2022, arXiv:2205.14794), to be read beside section 3.

Notation: B rows, T tokens, S keys, H heads of width D, n = H·D channels; K tokens in a chunk; N state vectors.

A text is cut into chunks X_1, X_2, … of K tokens, which two streams process:

    X̄_l = F(X_l, I_l)          fast: a Transformer within the chunk, which attends to the states every R layers
    I_{l+1} = G(I_l, X̄_l)      slow: N state vectors, once a chunk, by cross-attention to the fast stream's output

From the paper: the chunks, both streams and their order, F as R times SELF ATTENTION + FFN and then CROSS ATTENTION +
FFN, repeated, G as one CROSS ATTENTION + FFN with the states as queries, weights shared by all chunks. From public
code of the model for the Long Range Arena (`StatefulTransformerEncoder`): layer normalisation of the inputs of each
attention and feed-forward layer, with residuals; fixed sinusoids of the position within the chunk, added to its
tokens, and of the index of a state vector, added to the states before each chunk; zeros as the first state.

Different here: self-attention is causal, also in the classifier (that code looks both ways within a chunk); states are
normalised after each update, since they would grow without bound over a long text otherwise; embeddings are scaled by
√n, as in Transformers with sinusoids; X̄ is normalised before the head; and a segment may end within a chunk. The
state is passed on without gradient, so the slow stream learns only from segments that continue after the end of a
chunk. The classifier reads the last token, which has seen its chunk and, through the states, those before (the Long
Range Arena's classifier reads the mean of the states, which have seen whole chunks only).

RSA heads belong on the self-attention of the fast stream, and their recurrence restarts with each chunk: across chunks
the slow stream is the recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.attention import InterfaceAttention, sinusoids
from rsa_hf.models.segments import (
    SegmentForCausalLM,
    SegmentForSequenceClassification,
    SegmentPreTrainedModel,
    StateOutput,
    require_shapes,
)
from rsa_hf.models.temporal_latent_bottleneck.configuration_temporal_latent_bottleneck import (
    TemporalLatentBottleneckConfig,
)

__all__ = [
    "TemporalLatentBottleneckForCausalLM",
    "TemporalLatentBottleneckForSequenceClassification",
    "TemporalLatentBottleneckModel",
]


class Placement:
    """The slots of a segment's tokens, counted from the beginning of the current chunk of each row.

    The first `filled[b]` slots of row b hold tokens of earlier segments. Padding takes no slot, so a row is cut into
    the same chunks alone and in a batch.

    Args:
        filled: number of slots of each row that earlier segments have filled.
        length: number of tokens of the segment T, padding included.
        real: [B, T], False for padding; None: there is none.
        device: device of the tokens.

    Attributes:
        ends: the slot after the last token of each row.
        first: the first slot to compute in any row.
        last: the slot after the last one to compute.
    """

    def __init__(self, filled: Sequence[int], length: int, real: Tensor | None, device: torch.device) -> None:
        counts = [length] * len(filled) if real is None else real.sum(1).tolist()
        self.ends = [before + count for before, count in zip(filled, counts, strict=True)]
        self.first = min(filled)
        self.last = max(*self.ends, self.first + 1)
        self._places: Tensor | None = None
        if real is not None or len(set(filled)) > 1:
            real = torch.ones(len(filled), length, dtype=torch.bool, device=device) if real is None else real
            starts = torch.tensor(filled, device=device)[:, None] - self.first
            # Padding goes into an extra place after all slots, which is cut off.
            self._places = torch.where(real, starts + real.cumsum(1) - 1, self.last - self.first)[..., None]

    def put(self, tokens: Tensor) -> Tensor:
        """[B, T, n] → [B, last − first, n], zeros where a row has no token."""
        if self._places is None:
            return tokens
        B, _, n = tokens.shape
        slots = tokens.new_zeros(B, self.last - self.first + 1, n)
        return slots.scatter(1, self._places.expand_as(tokens), tokens)[:, :-1]

    def take(self, slots: Tensor) -> Tensor:
        """Undo `put`; zeros where there was padding."""
        if self._places is None:
            return slots
        B, _, n = slots.shape
        return torch.cat([slots, slots.new_zeros(B, 1, n)], 1).gather(1, self._places.expand(-1, -1, n))


class Chunk(NamedTuple):
    """What the fast stream has computed of the first S slots of a chunk.

    Attributes:
        outputs: X̄, [B, S, n].
        keys_values: of each self-attention layer, [B, 2, H, S, D].
        is_there: for a chunk from an earlier segment, which slots each row has filled, [B, K]; else None.
    """

    outputs: Tensor
    keys_values: tuple[Tensor, ...]
    is_there: Tensor | None = None


def merged(earlier: Tensor | None, new: Tensor, is_earlier: Tensor | None) -> Tensor:
    """Merge what earlier segments and this one have computed of a chunk's slots.

    Args:
        earlier: of the first M slots, [B, …, M, D]; undefined in slots that a row has not filled. None: there are no
            earlier segments.
        new: of the last T of the S slots, [B, …, T, D].
        is_earlier: which slots earlier segments have filled, [B, S]; None without `earlier`.

    Returns:
        [B, …, S, D].
    """
    if earlier is None or is_earlier is None:
        return new
    B, S = is_earlier.shape
    chosen = is_earlier.view(B, *[1] * (new.dim() - 3), S, 1)
    earlier, new = F.pad(earlier, (0, 0, 0, S - earlier.shape[-2])), F.pad(new, (0, 0, S - new.shape[-2], 0))
    return torch.where(chosen, earlier.to(new.dtype), new)


class StreamAttention(InterfaceAttention):
    """Base of self- and cross-attention."""

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        head_dim = config.hidden_size // config.num_attention_heads
        super().__init__(config, head_dim**-0.5, config.attention_dropout)
        self.heads = (config.num_attention_heads, head_dim)


class SelfAttention(StreamAttention):
    """Causal attention within a chunk, where RSA heads belong."""

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__(config)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, visible: Tensor, earlier: Tensor | None, is_earlier: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend within a chunk.

        Args:
            hidden: the tokens, in the last T of S slots, [B, T, n].
            visible: which slots each token sees, [1, 1, T, S].
            earlier: keys and values of the tokens of earlier segments, [B, 2, H, M, D].
            is_earlier: as for `merged`.

        Returns:
            The output, [B, T, n], and the keys and values of all slots, [B, 2, H, S, D].
        """
        query, key, value = self.qkv(hidden).unflatten(-1, (3, *self.heads)).permute(2, 0, 3, 1, 4)
        keys_values = merged(earlier, torch.stack([key, value], dim=1), is_earlier)
        return self.out(self.attend(query, keys_values[:, 0], keys_values[:, 1], visible)[0]), keys_values


class CrossAttention(StreamAttention):
    """Attention of one stream to the other. They have no common time axis, so it is never patched."""

    is_causal = False

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__(config)
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key_value = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        """[B, T, n] and the other stream's [B, S, n] → [B, T, n]."""
        query = self.query(hidden).unflatten(-1, self.heads).transpose(1, 2)
        key, value = self.key_value(other).unflatten(-1, (2, *self.heads)).permute(2, 0, 3, 1, 4)
        return cast(Tensor, self.out(self.attend(query, key, value, None)[0]))


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
    """CROSS ATTENTION + FFN of the paper: one stream attends to the other."""

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
    """SELF ATTENTION + FFN of the paper and, after every R-th, CROSS ATTENTION + FFN to the states."""

    def __init__(self, config: TemporalLatentBottleneckConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config)
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


class TemporalLatentBottleneckPreTrainedModel(SegmentPreTrainedModel):
    """Base class: initialisation, and attributes that differ from those of other models with a state."""

    config_class = TemporalLatentBottleneckConfig
    config: TemporalLatentBottleneckConfig
    _no_split_modules = ["FastLayer"]  # noqa: RUF012  (transformers' own type)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            # Scaled by √n, they are of the same size as the sinusoids.
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        else:
            super()._init_weights(module)  # type: ignore[no-untyped-call]


class TemporalLatentBottleneckModel(TemporalLatentBottleneckPreTrainedModel):
    """Both streams, without a head."""

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__(config)
        n = config.hidden_size
        self.scale = n**0.5
        self.embeddings: nn.Module = nn.Embedding(config.vocab_size, n, padding_idx=config.pad_token_id)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(FastLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(n, eps=config.layer_norm_eps)
        self.slow = CrossLayer(config)
        self.slow_norm = nn.LayerNorm(n, eps=config.layer_norm_eps)
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def rsa_probe_inputs(self) -> dict[str, Any]:
        """A small input for `patch_model`. Its length is not the number of states, to tell cross-attention apart."""
        K, N = self.config.chunk_size, self.config.num_states
        length = next(T for T in (4, 3, 2, 1) if K >= T != N)
        return {"input_ids": torch.zeros(1, length, dtype=torch.long, device=self.device)}

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> StateOutput:
        """Hidden states of a segment, which may begin and end within a chunk.

        Args:
            input_ids: shape [B, T].
            attention_mask: shape [B, T] or longer, of which the last T columns are read; 0 for padding, on either side
                or between tokens, which counts in no chunk; None: no padding.
            state: what the call on the segment before returned: the states, [B, N, n]; then, of the unfinished chunk
                with M < K tokens in the longest row, X̄ of the tokens, [B, M, n], their keys and values in each
                self-attention layer, [B, layers, 2, H, M, D], and the number of tokens in each row, [B]. None: the
                text begins here.
            inputs_embeds: shape [B, T, n], instead of `input_ids`, after the scaling.
            use_cache: whether to return the state; None: as the config says.
            output_hidden_states: whether to return the fast stream's input and the output of each of its layers, the
                last one normalised.
        """
        embedded = self.embed(lambda tokens: self.embeddings(tokens) * self.scale, input_ids, inputs_embeds)
        T, n = embedded.shape[1:]
        K, device = self.config.chunk_size, embedded.device
        states, chunk, filled = self._begin(state, embedded)
        real = None if attention_mask is None else attention_mask[:, -T:].bool()
        placement = Placement(filled, T, None if real is None or bool(real.all()) else real, device)
        tokens = placement.put(embedded)
        positions = sinusoids(torch.arange(K, device=device), n).to(embedded.dtype)
        numbers = sinusoids(torch.arange(self.config.num_states, device=device), n).to(embedded.dtype)
        visible: Tensor | None = None
        computed: list[list[Tensor]] = []
        unfinished: Chunk | None = None
        for start in range(0, placement.last, K):
            first, last = max(start, placement.first), min(start + K, placement.last)
            if visible is None or visible.shape[2:] != (last - first, last - start):
                # One tensor for all chunks of a shape, so that a mask is read once.
                visible = torch.ones(last - first, last - start, dtype=torch.bool, device=device)
                visible = visible.tril(first - start)[None, None]
            hidden = tokens[:, first - placement.first : last - placement.first]
            hidden = self.dropout(hidden + positions[first - start : last - start])
            states_seen = states + numbers
            passed, made = self._fast(hidden, states_seen, visible, chunk)
            computed.append(passed)
            chunk = None
            finished = [end >= start + K for end in placement.ends]
            if any(finished):
                states = _of_rows(finished, self.slow_norm(self.slow(states_seen, made.outputs)), states)
            ends_here = [start <= end < start + K for end in placement.ends]
            if any(ends_here):
                unfinished = made if unfinished is None else _replaced(ends_here, made, unfinished)

        *hidden_states, last_hidden = (placement.take(torch.cat(pieces, 1)) for pieces in zip(*computed, strict=True))
        last_hidden = self.norm(last_hidden)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return StateOutput(
            last_hidden_state=last_hidden,
            state=self._end(states, unfinished, [end % K for end in placement.ends]) if use_cache else None,
            hidden_states=(*hidden_states, last_hidden) if output_hidden_states else None,
        )

    def _fast(
        self, hidden: Tensor, states: Tensor, visible: Tensor, earlier: Chunk | None
    ) -> tuple[list[Tensor], Chunk]:
        """F: the input and the output of each layer, [B, T, n], and the chunk with these tokens added."""
        is_earlier = None
        if earlier is not None and earlier.is_there is not None:
            is_earlier = earlier.is_there[:, : visible.shape[-1]]
        passed, keys_values = [hidden], []
        for i, layer in enumerate(self.layers):
            before = None if earlier is None else earlier.keys_values[i]
            hidden, after = layer(hidden, states, visible, before, is_earlier)
            passed.append(hidden)
            keys_values.append(after)
        outputs = merged(None if earlier is None else earlier.outputs, hidden, is_earlier)
        return passed, Chunk(outputs, tuple(keys_values))

    def _begin(self, state: Sequence[Tensor] | None, embedded: Tensor) -> tuple[Tensor, Chunk | None, list[int]]:
        """The states, the unfinished chunk, and how many slots of it each row has filled."""
        config, B = self.config, embedded.shape[0]
        n, H, N = config.hidden_size, config.num_attention_heads, config.num_states
        if state is None:
            return embedded.new_zeros(B, N, n), None, [0] * B
        # A longer chunk comes from another chunk_size, and is refused.
        M = min(state[-2].shape[-2], config.chunk_size - 1)
        require_shapes("state", state, [(B, N, n), (B, M, n), (B, config.num_hidden_layers, 2, H, M, n // H), (B,)])
        states, outputs, keys_values, filled = state
        is_there = torch.arange(config.chunk_size, device=embedded.device) < filled[:, None]
        return states, Chunk(outputs, keys_values.unbind(1), is_there) if M else None, filled.tolist()

    def _end(self, states: Tensor, unfinished: Chunk | None, filled: list[int]) -> tuple[Tensor, ...]:
        """The state for the next segment, without gradient."""
        config, B = self.config, len(states)
        M, H, n = max(filled), config.num_attention_heads, config.hidden_size
        if unfinished is None:
            outputs = states.new_zeros(B, 0, n)
            keys_values = states.new_zeros(B, config.num_hidden_layers, 2, H, 0, n // H)
        else:
            outputs = unfinished.outputs[:, :M].detach()
            keys_values = torch.stack(unfinished.keys_values, dim=1)[..., :M, :].detach()
        return states.detach(), outputs, keys_values, torch.tensor(filled, device=states.device)


def _of_rows(chosen: list[bool], new: Tensor, old: Tensor) -> Tensor:
    """New values for the chosen rows, old ones for the others."""
    if all(chosen):
        return new
    rows = torch.tensor(chosen, device=new.device).view(-1, *[1] * (new.dim() - 1))
    return torch.where(rows, new, old)


def _replaced(chosen: list[bool], new: Chunk, old: Chunk) -> Chunk:
    """The new chunk for the chosen rows, the old one for the others; the shorter is padded with zeros."""

    def of_rows(new: Tensor, old: Tensor) -> Tensor:
        longest = max(new.shape[-2], old.shape[-2])
        new, old = (F.pad(part, (0, 0, 0, longest - part.shape[-2])) for part in (new, old))
        return _of_rows(chosen, new, old)

    keys_values = tuple(map(of_rows, new.keys_values, old.keys_values))
    return Chunk(of_rows(new.outputs, old.outputs), keys_values)


class TemporalLatentBottleneckForCausalLM(TemporalLatentBottleneckPreTrainedModel, SegmentForCausalLM):
    """A Temporal Latent Bottleneck that predicts the next token."""

    base_class = TemporalLatentBottleneckModel


class TemporalLatentBottleneckForSequenceClassification(
    TemporalLatentBottleneckPreTrainedModel, SegmentForSequenceClassification
):
    """A Temporal Latent Bottleneck with a linear classifier on the last token that is not padding."""

    base_class = TemporalLatentBottleneckModel
