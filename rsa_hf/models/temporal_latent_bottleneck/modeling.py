r"""Temporal Latent Bottleneck without a head (Didolkar et al., 2022, arXiv:2205.14794), to be read beside section 3.

A text is cut into chunks X_1, X_2, … of K tokens. Over them run two streams:

    X̄_l = F(X_l, I_l)          fast: a Transformer within the chunk, which looks at the states every R layers
    I_{l+1} = G(I_l, X̄_l)      slow: N state vectors, once a chunk, by cross-attention to what the fast stream made

From the paper: the chunks, both streams and their order, F as R times SELF ATTENTION + FFN and then CROSS ATTENTION +
FFN, and so on, G as one CROSS ATTENTION + FFN with the states as queries, weights shared by all chunks. From public
code of the model for the Long Range Arena (`StatefulTransformerEncoder`): layer normalisation of the inputs of each
attention and feed-forward layer, with residuals; fixed sinusoids for the position within the chunk, the same in every
chunk, added to its tokens, and for the number of a state vector, added to the states before each chunk; zeros as the
first state.

Ours: self-attention is causal, also in the classifier (that code looks both ways within a chunk); states are
normalised behind each update, since they would grow for ever over a long text otherwise; embeddings are scaled by √n,
as in Transformers with sinusoids; a last layer normalisation of X̄ before the head; and a state that may be handed
over within a chunk. It is handed over without gradient, so the slow stream learns only from segments that go on behind
the end of a chunk.

RSA heads belong on the self-attention of the fast stream, and their recurrence begins anew with each chunk: across
chunks the slow stream is the recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput, can_return_tuple

from rsa_hf.models.temporal_latent_bottleneck.chunks import Placement
from rsa_hf.models.temporal_latent_bottleneck.configuration import TemporalLatentBottleneckConfig
from rsa_hf.models.temporal_latent_bottleneck.layers import CrossLayer, FastLayer, merged
from rsa_hf.models.transformer_xl.attention import sinusoids

__all__ = [
    "State",
    "TemporalLatentBottleneckModel",
    "TemporalLatentBottleneckOutput",
    "TemporalLatentBottleneckPreTrainedModel",
]

State = tuple[Tensor, ...]


@dataclass
class TemporalLatentBottleneckOutput(ModelOutput):
    """What the models return.

    Attributes:
        loss: with labels.
        logits: [B, T, V], or [B, num_labels] of a classifier.
        last_hidden_state: of the model without a head, [B, T, n]; where there is padding it means nothing.
        state: to go on with the next segment, detached; four tensors, of which the last three are the chunk that the
            text has ended in, M < K tokens in the longest row:
            the states [B, N, n]; X̄ of the tokens [B, M, n]; their keys and values in each self-attention layer
            [B, layers, 2, H, M, D]; the number of tokens in each row, [B].
        hidden_states: what went into the fast stream, and the output of each of its layers, [B, T, n]; the last
            one normalised.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    state: State | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class _Chunk(NamedTuple):
    """What the fast stream has made of the first S slots of a chunk.

    Attributes:
        outputs: X̄, [B, S, n].
        keys_values: of each self-attention layer, [B, 2, H, S, D].
        is_there: [B, K], of a chunk from an earlier segment: the slots that each row has filled.
    """

    outputs: Tensor
    keys_values: tuple[Tensor, ...]
    is_there: Tensor | None = None


class TemporalLatentBottleneckPreTrainedModel(PreTrainedModel):
    """What all models share: configuration, and what transformers wants to know.

    Attributes:
        segment_state: the argument and output that carries a text on from segment to segment.
    """

    config_class = TemporalLatentBottleneckConfig
    config: TemporalLatentBottleneckConfig
    base_model_prefix = "model"
    segment_state = "state"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _is_stateful = True
    _no_split_modules = ["FastLayer"]  # noqa: RUF012  (transformers' own type)
    _skip_keys_device_placement = ["state"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            # Scaled by √n they are of the same size as the sinusoids.
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

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table."""
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table."""
        self.embeddings = value

    @property
    def rsa_probe_inputs(self) -> dict[str, Any]:
        """A small input for `patch_model`, of another length than there are states: cross-attention must show."""
        K, N = self.config.chunk_size, self.config.num_states
        length = next(T for T in (4, 3, 2, 1) if K >= T != N)
        return {"input_ids": torch.zeros(1, length, dtype=torch.long, device=self.device)}

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> TemporalLatentBottleneckOutput:
        """Hidden states of a segment, which may begin and end within a chunk.

        Args:
            input_ids: shape [B, T].
            attention_mask: shape [B, T] or longer, its last T columns are read; 0 for padding, on either side or
                between: it counts in no chunk. None: no padding.
            state: what the call on the segment before returned; None: the text begins here.
            inputs_embeds: shape [B, T, n], in place of `input_ids`; not scaled any more.
            use_cache: return the state; None: as the config says.
            output_hidden_states: return what went into the fast stream, and each layer's output.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`, no tokens, or a mask or state that does not
                fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        embedded: Tensor = self.embeddings(input_ids) * self.scale if inputs_embeds is None else inputs_embeds
        B, T, n = embedded.shape
        if T == 0:
            raise ValueError("a segment of 0 tokens: at least one is needed.")
        K, device = self.config.chunk_size, embedded.device
        states, chunk, filled = self._begin(state, embedded)
        placement = Placement(filled, T, _real(attention_mask, B, T), device)
        tokens = placement.put(embedded)
        positions = sinusoids(torch.arange(K, device=device), n).to(embedded.dtype)
        numbers = sinusoids(torch.arange(self.config.num_states, device=device), n).to(embedded.dtype)
        visible: Tensor | None = None
        computed: list[list[Tensor]] = []
        unfinished: _Chunk | None = None
        for start in range(0, placement.last, K):
            first, last = max(start, placement.first), min(start + K, placement.last)
            if visible is None or visible.shape[2:] != (last - first, last - start):
                # One tensor for all chunks of a shape: who reads a mask reads it once.
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
        wanted = self.config.use_cache if use_cache is None else use_cache
        return TemporalLatentBottleneckOutput(
            last_hidden_state=last_hidden,
            state=self._end(states, unfinished, [end % K for end in placement.ends]) if wanted else None,
            hidden_states=(*hidden_states, last_hidden) if output_hidden_states else None,
        )

    def _fast(
        self, hidden: Tensor, states: Tensor, visible: Tensor, earlier: _Chunk | None
    ) -> tuple[list[Tensor], _Chunk]:
        """F: what went into the layers and what came out of each, [B, T, n], and the chunk as it is then."""
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
        return passed, _Chunk(outputs, tuple(keys_values))

    def _begin(self, state: State | None, embedded: Tensor) -> tuple[Tensor, _Chunk | None, list[int]]:
        """The states, the chunk that the text is in, and how many slots of it each row has filled."""
        config, B = self.config, embedded.shape[0]
        n, H = config.hidden_size, config.num_attention_heads
        if state is None:
            return embedded.new_zeros(B, config.num_states, n), None, [0] * B
        if len(state) != 4:
            raise ValueError(
                f"state has {len(state)} entries; 4 are needed: states, outputs, keys and values, numbers of tokens."
            )
        states, outputs, keys_values, filled = state
        M = outputs.shape[1] if outputs.dim() == 3 else 0
        found = [tuple(part.shape) for part in state]
        needed = [(B, config.num_states, n), (B, M, n), (B, config.num_hidden_layers, 2, H, M, n // H), (B,)]
        if found != needed:
            raise ValueError(
                f"state has shapes {found}; {needed} are needed: [batch, num_states, hidden_size], [batch, tokens of "
                "the chunk, hidden_size], [batch, layers, 2, heads, tokens of the chunk, width of a head], [batch]."
            )
        counts: list[int] = filled.tolist()
        if config.chunk_size <= M or not all(0 <= count <= M for count in counts):
            raise ValueError(
                f"state says that rows have {counts} tokens in a chunk of which it holds {M}, where chunk_size="
                f"{config.chunk_size}: a chunk that goes on has fewer tokens than chunk_size, and the state holds all "
                "of them. Use a state of this model."
            )
        if states.dtype != embedded.dtype and not torch.is_autocast_enabled(embedded.device.type):
            raise ValueError(
                f"state is {states.dtype}, but the segment's embeddings are {embedded.dtype}. Use the state of this "
                "model in this dtype, or convert it with .to()."
            )
        is_there = torch.arange(config.chunk_size, device=embedded.device) < filled[:, None]
        return states, _Chunk(outputs, keys_values.unbind(1), is_there) if M else None, counts

    def _end(self, states: Tensor, unfinished: _Chunk | None, filled: list[int]) -> State:
        """What goes on to the next segment, without gradient."""
        config, B = self.config, len(states)
        M, H, n = max(filled), config.num_attention_heads, config.hidden_size
        if unfinished is None:
            outputs = states.new_zeros(B, 0, n)
            keys_values = states.new_zeros(B, config.num_hidden_layers, 2, H, 0, n // H)
        else:
            outputs = unfinished.outputs[:, :M].detach()
            keys_values = torch.stack(unfinished.keys_values, dim=1)[..., :M, :].detach()
        return states.detach(), outputs, keys_values, torch.tensor(filled, device=states.device)


def _real(attention_mask: Tensor | None, B: int, T: int) -> Tensor | None:
    """Which tokens of the segment are no padding, [B, T]; None: all."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; [batch, tokens] = [{B}, {T} or more] is needed."
        )
    real = attention_mask[:, -T:].bool()
    return None if bool(real.all()) else real


def _of_rows(chosen: list[bool], new: Tensor, old: Tensor) -> Tensor:
    """The new of the chosen rows, the old of the others."""
    if all(chosen):
        return new
    rows = torch.tensor(chosen, device=new.device).view(-1, *[1] * (new.dim() - 1))
    return torch.where(rows, new, old)


def _replaced(chosen: list[bool], new: _Chunk, old: _Chunk) -> _Chunk:
    """The new chunk of the chosen rows, the old of the others; zeros behind the shorter one."""

    def of_rows(new: Tensor, old: Tensor) -> Tensor:
        longest = max(new.shape[-2], old.shape[-2])
        new, old = (F.pad(part, (0, 0, 0, longest - part.shape[-2])) for part in (new, old))
        return _of_rows(chosen, new, old)

    keys_values = tuple(map(of_rows, new.keys_values, old.keys_values))
    return _Chunk(of_rows(new.outputs, old.outputs), keys_values)
