r"""Temporal Latent Bottleneck (Didolkar et al., 2022, arXiv:2205.14794), to be read alongside section 3.

Notation: B rows, T tokens, S keys, H heads of width D, n = H·D channels; K tokens in a chunk; N state vectors.

A text is cut into chunks X_1, X_2, … of K tokens, which two streams process:

    X̄_l = F(X_l, I_l)          fast: a Transformer within the chunk, which attends to the states every R layers
    I_{l+1} = G(I_l, X̄_l)      slow: N state vectors, once a chunk, by cross-attention to the fast stream's output

From the paper: the chunks; both streams and their order; F as R times SELF ATTENTION + FFN, then CROSS ATTENTION +
FFN, repeated; G as one CROSS ATTENTION + FFN with the states as queries; weights shared by all chunks. From public
code of the model for the Long Range Arena (`StatefulTransformerEncoder`): layer normalisation of the inputs of each
attention and feed-forward layer, with residuals; fixed sinusoids of the position within the chunk, added to its
tokens, and of the index of a state vector, added to the states before each chunk; zeros as the first state.

Different here: self-attention is causal, also in the classifier (that code looks both ways within a chunk); states are
normalised after each update, since they would otherwise grow without bound over a long text; embeddings are scaled by
√n, as in Transformers with sinusoids; X̄ is normalised before the head; and a segment may end within a chunk. The
state is passed on without gradient, so the slow stream learns only from segments that continue after the end of a
chunk. The classifier reads the last token, which has seen its chunk and, through the states, the chunks before (the
Long Range Arena's classifier reads the mean of the states, which have seen only whole chunks).

RSA heads belong on the self-attention of the fast stream, and their recurrence restarts with each chunk: across chunks
the slow stream is the recurrence.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import can_return_tuple

from rsa_hf.models import segments
from rsa_hf.models.interface_attention import InterfaceAttention, sinusoids
from rsa_hf.models.temporal_latent_bottleneck.configuration_temporal_latent_bottleneck import (
    TemporalLatentBottleneckConfig,
)

__all__ = [
    "TemporalLatentBottleneckForCausalLM",
    "TemporalLatentBottleneckForSequenceClassification",
    "TemporalLatentBottleneckModel",
]


def merged(earlier: Tensor, new: Tensor, is_earlier: Tensor) -> Tensor:
    """Merge what earlier segments and this one have computed for the first S slots of a chunk, [B, …, S, D].

    `earlier` has all K slots, [B, …, K, D], undefined where earlier segments have no token. `new` has the last T of
    the S slots, [B, …, T, D]. `is_earlier`, [B, S]: which slots earlier segments have filled.
    """
    B, S = is_earlier.shape
    new = F.pad(new, (0, 0, S - new.shape[-2], 0))
    return torch.where(is_earlier.view(B, *[1] * (new.dim() - 3), S, 1), earlier[..., :S, :].to(new.dtype), new)


def kept(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new tensor for the chosen rows, the old one for the others; dimension −2 of `new` is padded."""
    new = F.pad(new, (0, 0, 0, old.shape[-2] - new.shape[-2]))
    return torch.where(rows.to(new.device).view(-1, *[1] * (new.dim() - 1)), new, old.to(new.dtype))


class SelfAttention(InterfaceAttention):
    """Causal attention within a chunk, where RSA heads belong."""

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__(config, config.num_attention_heads, config.hidden_size, config.attention_dropout)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, visible: Tensor, earlier: Tensor, is_earlier: Tensor) -> tuple[Tensor, Tensor]:
        """From the tokens in the last T of S slots, [B, T, n], to the output and keys and values, [B, 2, H, S, D].

        `visible`, [1, 1, T, S], says which slots each token sees. `earlier` holds the keys and values of the tokens of
        earlier segments, [B, 2, H, K, D]; it and `is_earlier` are as for `merged`.
        """
        query, key, value = self.qkv(hidden).unflatten(-1, (3, *self.heads)).permute(2, 0, 3, 1, 4)
        keys_values = merged(earlier, torch.stack([key, value], dim=1), is_earlier)
        return self.out(self.attend(query, keys_values[:, 0], keys_values[:, 1], visible)[0]), keys_values


class CrossAttention(InterfaceAttention):
    """Attention of one stream to the other. The streams share no time axis, so this attention is never patched."""

    is_causal = False

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__(config, config.num_attention_heads, config.hidden_size, config.attention_dropout)
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
        self, hidden: Tensor, states: Tensor, visible: Tensor, earlier: Tensor, is_earlier: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `SelfAttention.forward`, with the states [B, N, n]."""
        attended, keys_values = self.attention(self.norm(hidden), visible, earlier, is_earlier)
        hidden = hidden + self.drop(attended)
        hidden = hidden + self.feed_forward(hidden)
        return hidden if self.cross is None else self.cross(hidden, states), keys_values


class TemporalLatentBottleneckPreTrainedModel(segments.SegmentPreTrainedModel):
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
    ) -> segments.SegmentOutput:
        """Hidden states of a segment, which may begin and end within a chunk.

        For the arguments, see `rsa_hf.models.segments`; `inputs_embeds` are scaled already. Padding may stand on
        either side or between tokens, and belongs to no chunk. The state is the state vectors, [B, N, n]; then, of the
        unfinished chunk, X̄ of its tokens, [B, K, n], their keys and values in each layer, [B, layers, 2, H, K, D],
        and how many tokens each row has, [B]. `hidden_states` are the fast stream's input and the output of each of
        its layers, the last one normalised.
        """
        embedded = self.embed(lambda tokens: self.embeddings(tokens) * self.scale, input_ids, inputs_embeds)
        config, (B, T, n), device = self.config, embedded.shape, embedded.device
        H, K, N = config.num_attention_heads, config.chunk_size, config.num_states
        shapes = [(B, N, n), (B, K, n), (B, config.num_hidden_layers, 2, H, K, n // H), (B,)]
        if state is None:
            zeros = (embedded.new_zeros(shape) for shape in shapes[:-1])
            state = [*zeros, torch.zeros(B, dtype=torch.long, device="cpu")]
        segments.require_shapes("state", state, shapes)
        states, outputs, keys_values, filled = *state[:-1], state[-1].cpu()
        # Tokens stand in slots, counted from the beginning of each row's unfinished chunk. Padding takes no slot but
        # goes to an extra place after all slots, so a row is cut into the same chunks alone and in a batch. With
        # K = 4, T = 3 and `filled` = (3, 0), rows end at (6, 3): the first takes slots 3, 4 and 5, finishes chunk
        # 0 … 3 and begins 4 … 7; the second takes 0, 1 and 2. Slots are counted on the CPU: the loop depends on them.
        real = torch.ones(B, T, dtype=torch.bool, device="cpu")
        if attention_mask is not None:
            real = attention_mask[:, -T:].bool().cpu()
        ends = filled + real.sum(1)
        first = int(filled.min())
        last = max(*ends.tolist(), first + 1)
        slots = filled[:, None] - first + real.cumsum(1) - 1
        slots = torch.where(real, slots, last - first)[..., None].expand(-1, -1, n).to(device)
        tokens = embedded.new_zeros(B, last - first + 1, n).scatter(1, slots, embedded)
        positions = sinusoids(torch.arange(K, device=device), n).to(embedded.dtype)
        numbers = sinusoids(torch.arange(N, device=device), n).to(embedded.dtype)
        visible, passed = torch.empty(0), list[list[Tensor]]()
        for start in range(0, last, K):
            begin, end = max(start, first), min(start + K, last)
            if visible.shape[2:] != (end - begin, end - start):
                # One tensor for all chunks of a shape, so that a mask is read once.
                visible = torch.ones(end - begin, end - start, dtype=torch.bool, device=device)
                visible = visible.tril(begin - start)[None, None]
            is_earlier = (torch.arange(start, end, device="cpu") < filled[:, None]).to(device)
            hidden = self.dropout(tokens[:, begin - first : end - first] + positions[begin - start : end - start])
            hiddens, made, states_seen = [hidden], [], states + numbers
            for i, layer in enumerate(self.layers):
                hidden, of_layer = layer(hidden, states_seen, visible, keys_values[:, i], is_earlier)
                hiddens.append(hidden)
                made.append(of_layer)
            passed.append(hiddens)
            whole = merged(outputs, hidden, is_earlier)
            if end == start + K:
                states = kept(ends >= end, self.slow_norm(self.slow(states_seen, whole)), states)
            unfinished = (start < ends) & (ends < start + K)
            if bool(unfinished.any()):
                outputs = kept(unfinished, whole, outputs)
                keys_values = kept(unfinished, torch.stack(made, dim=1), keys_values)

        # Padding reads the extra place, which is zero.
        whole_text = (F.pad(torch.cat(pieces, 1), (0, 0, 0, 1)) for pieces in zip(*passed, strict=True))
        *hidden_states, last_hidden = (hidden.gather(1, slots) for hidden in whole_text)
        last_hidden = self.norm(last_hidden)
        use_cache = config.use_cache if use_cache is None else use_cache
        state = states.detach(), outputs.detach(), keys_values.detach(), (ends % K).to(device)
        return segments.SegmentOutput(
            last_hidden_state=last_hidden,
            state=state if use_cache else None,
            hidden_states=(*hidden_states, last_hidden) if output_hidden_states else None,
        )


class TemporalLatentBottleneckForCausalLM(TemporalLatentBottleneckPreTrainedModel, segments.SegmentForCausalLM):
    """A Temporal Latent Bottleneck that predicts the next token."""


class TemporalLatentBottleneckForSequenceClassification(
    TemporalLatentBottleneckPreTrainedModel, segments.SegmentForSequenceClassification
):
    """A Temporal Latent Bottleneck with a linear classifier on the last token that is not padding."""
