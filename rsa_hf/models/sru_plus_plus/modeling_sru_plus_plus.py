r"""SRU++ (Lei, 2021, arXiv:2102.12459), to be read alongside the paper.

Notation: B rows, T tokens of a segment, M positions of memory, d channels, d′ channels of attention, H heads of width
D.

A layer is attention, then the elementwise recurrence of SRU (Lei et al., 2018, arXiv:1709.02755), whose highway gate
is the residual connection. X are the layer's inputs, first those of the memory, then those of the segment; only the
segment has queries. For each head

    Q = X W_qᵀ      K = Q W_kᵀ      V = Q W_vᵀ
    A = softmax(Q Kᵀ / √D) V
    U = layernorm(Q + α A) W_oᵀ

α starts at 0, so that a layer starts as a recurrence whose weights are the product W_o W_q of small matrices. RSA
heads mix into A, so their gates and rates get no gradient until α has moved.

With U = [U⁰; U¹; U²] and the segment's inputs x, each channel on its own:

    f[t] = σ(U⁰[t] + v ⊙ c[t−1] + b)                    forget gate
    r[t] = σ(U¹[t] + v′ ⊙ c[t−1] + b′)                  highway gate
    c[t] = f[t] ⊙ c[t−1] + (1 − f[t]) ⊙ U²[t]           cell
    h[t] = r[t] ⊙ c[t] + (1 − r[t]) ⊙ x[t]              output

The forget gate depends on the previous cell, so c[t] is not linear in c[t−1], and no parallel scan can compute it.
Cells are computed step by step, with three operations on [B, d] per step, all else for the whole segment at once.

Segments give the same result as one long text as long as the memory reaches back to the beginning of the text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from rsa_hf.models import segments
from rsa_hf.models.interface_attention import InterfaceAttention, next_memory, visibility
from rsa_hf.models.sru_plus_plus.configuration_sru_plus_plus import SRUPlusPlusConfig

__all__ = ["SRUPlusPlusForCausalLM", "SRUPlusPlusForSequenceClassification", "SRUPlusPlusModel"]


class SRUPlusPlusAttention(InterfaceAttention):
    """From a layer's inputs to U."""

    def __init__(self, config: SRUPlusPlusConfig) -> None:
        d, small = config.hidden_size, config.projection_size
        super().__init__(config, config.num_attention_heads, small, config.attention_dropout)
        self.q_proj = nn.Linear(d, small, bias=False)
        self.kv_proj = nn.Linear(small, 2 * small, bias=False)  # W_k above W_v
        self.o_proj = nn.Linear(small, 3 * d, bias=False)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.layer_norm = nn.LayerNorm(small, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, memory: Tensor, visible: Tensor) -> tuple[Tensor, Tensor | None]:
        """U, [B, T, 3d], of a segment, [B, T, d], with a memory, [B, M, d]; and the attention weights or None."""
        Q = self.q_proj(torch.cat([memory, hidden], dim=1))
        key, value = self.kv_proj(Q).unflatten(-1, (2, *self.heads)).permute(2, 0, 3, 1, 4)
        Q = Q[:, -hidden.shape[1] :]
        A, weights = self.attend(Q.unflatten(-1, self.heads).transpose(1, 2), key, value, visible)
        return self.o_proj(self.dropout(self.layer_norm(Q + self.alpha * A))), weights


def cells(forget: Tensor, candidate: Tensor, weight: Tensor, first: Tensor) -> Tensor:
    """All c[t] = f[t] ⊙ c[t−1] + (1 − f[t]) ⊙ U²[t], f[t] = σ(forget[t] + v ⊙ c[t−1]), [B, T, d].

    The arguments are forget = U⁰ + b, [B, T, d], ∞ where the cell does not change; U², [B, T, d]; v, [d]; c[−1],
    [B, d].
    """
    cell, found = first, []
    for forget_t, candidate_t in zip(forget.unbind(1), candidate.unbind(1), strict=True):
        cell = torch.lerp(candidate_t, cell, torch.sigmoid(torch.addcmul(forget_t, weight, cell)))
        found.append(cell)
    return torch.stack(found, dim=1)


class SRUPlusPlusLayer(GradientCheckpointingLayer):
    """Attention, then the elementwise recurrence."""

    def __init__(self, config: SRUPlusPlusConfig) -> None:
        super().__init__()
        self.attention = SRUPlusPlusAttention(config)
        d = config.hidden_size
        self.forget_weight = nn.Parameter(torch.empty(d))
        self.forget_bias = nn.Parameter(torch.empty(d))
        self.highway_weight = nn.Parameter(torch.empty(d))
        self.highway_bias = nn.Parameter(torch.empty(d))

    def forward(
        self, hidden: Tensor, memory: Tensor, visible: Tensor, cell: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """From a segment's inputs, [B, T, d], to its outputs and the cell after it, [B, d], in float32 or float64.

        `memory` holds the inputs at the positions before the segment, [B, M, d], and `cell` is the cell before it.
        `visible`, [B or 1, 1, T, M + T], says which keys each query sees. `real`, [B, T], is False for padding, which
        does not change the cell.
        """
        U, _ = self.attention(hidden, memory, visible)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        forget, highway, candidate = U.to(dtype).chunk(3, dim=-1)
        forget = forget + self.forget_bias.to(dtype)
        if real is not None:
            forget = forget.masked_fill(~real[..., None], torch.inf)
        found = cells(forget, candidate, self.forget_weight.to(dtype), cell)
        before = torch.cat([cell[:, None], found[:, :-1]], dim=1)
        r = torch.sigmoid(highway + self.highway_bias.to(dtype) + self.highway_weight.to(dtype) * before)
        return torch.lerp(hidden.to(dtype), found, r).to(hidden.dtype), found[:, -1]


class SRUPlusPlusPreTrainedModel(segments.SegmentPreTrainedModel):
    """Base class: initialisation, and attributes that differ from those of other models with a state."""

    config_class = SRUPlusPlusConfig
    config: SRUPlusPlusConfig
    memory_settings = ("mem_len",)
    _no_split_modules = ["SRUPlusPlusLayer"]  # noqa: RUF012  (transformers' own type)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": SRUPlusPlusLayer,
        "attentions": OutputRecorder(SRUPlusPlusAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in the authors' code: Xavier for matrices, variance 1 / d for embeddings, v in [−1, 1]."""
        if isinstance(module, SRUPlusPlusLayer):
            for weight in (module.forget_weight, module.highway_weight):
                init.uniform_(weight, -1.0, 1.0)
            init.zeros_(module.forget_bias)
            init.constant_(module.highway_bias, self.config.highway_bias)
        elif isinstance(module, SRUPlusPlusAttention):
            init.zeros_(module.alpha)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        else:
            super()._init_weights(module)  # type: ignore[no-untyped-call]


class SRUPlusPlusModel(SRUPlusPlusPreTrainedModel):
    """SRU++ without a head."""

    def __init__(self, config: SRUPlusPlusConfig) -> None:
        super().__init__(config)
        self.embeddings: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(SRUPlusPlusLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()  # type: ignore[no-untyped-call]

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> segments.SegmentOutput:
        """Hidden states of a segment.

        For the arguments, see `rsa_hf.models.segments`. Padding may stand on either side or between tokens:
        attention does not see it, and cells skip it. The state is the cell of each layer, [B, d], in float32 or
        float64; then the memory of each layer, its inputs at the last M ≤ `mem_len` positions, [B, M, d].
        """
        hidden = self.embed(self.embeddings, input_ids, inputs_embeds)
        (B, T, d), L = hidden.shape, len(self.layers)
        if state is None:
            zeros = hidden.new_zeros(B, d, dtype=torch.promote_types(hidden.dtype, torch.float32))
            state = [zeros] * L + [hidden.new_zeros(B, 0, d)] * L
        M = state[-1].shape[1]
        segments.require_shapes("state", state, [(B, d)] * L + [(B, M, d)] * L)
        visible = visibility(T, M, None, attention_mask, hidden.device)
        real = None if attention_mask is None else attention_mask[:, -T:].bool()
        hidden = self.dropout(hidden)
        cells, memories = list[Tensor](), list[Tensor]()
        for layer, cell, memory in zip(self.layers, state[:L], state[L:], strict=True):
            memories.append(next_memory(memory, hidden, self.config.mem_len))
            hidden, cell = layer(hidden, memory, visible, cell, real)
            cells.append(cell.detach())
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return segments.SegmentOutput(
            last_hidden_state=self.dropout(hidden), state=(*cells, *memories) if use_cache else None
        )


class SRUPlusPlusForCausalLM(SRUPlusPlusPreTrainedModel, segments.SegmentForCausalLM):
    """SRU++ with a softmax over the next token."""


class SRUPlusPlusForSequenceClassification(SRUPlusPlusPreTrainedModel, segments.SegmentForSequenceClassification):
    """SRU++ with a linear classifier on the last token that is not padding."""
