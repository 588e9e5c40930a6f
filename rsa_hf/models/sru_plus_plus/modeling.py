"""SRU++ without a head (Lei, 2021, arXiv:2102.12459): layers, and the state that goes from segment to segment.

A text may be cut into segments: the state that a call returns goes into the next one. It holds each layer's last cell,
and the inputs of each layer at the last M positions, which its attention looks back on. Both are detached, so
gradients end where a segment begins (truncated back-propagation through time). Segments equal one long text as long as
M reaches back to where the text begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from rsa_hf.models.sru_plus_plus.attention import SRUPlusPlusAttention
from rsa_hf.models.sru_plus_plus.configuration import SRUPlusPlusConfig
from rsa_hf.models.sru_plus_plus.recurrence import elementwise_recurrence
from rsa_hf.models.transformer_xl.attention import visibility
from rsa_hf.ops.types import working_dtype

__all__ = ["SRUPlusPlusHeadOutput", "SRUPlusPlusModel", "SRUPlusPlusModelOutput", "SRUPlusPlusPreTrainedModel"]


@dataclass
class SRUPlusPlusModelOutput(ModelOutput):
    """Output of `SRUPlusPlusModel`.

    Attributes:
        last_hidden_state: shape [B, T, d].
        state: for the next segment, detached: the cell of each layer, [B, d], float32 or better, and after those the
            memory of each layer, [B, M, d].
        hidden_states: the embeddings and the output of each layer, [B, T, d].
        attentions: the softmax half of each layer, [B, H, T, S]; with eager attention.
    """

    last_hidden_state: Tensor | None = None
    state: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class SRUPlusPlusHeadOutput(ModelOutput):
    """Output of the models with a head.

    Attributes:
        loss: shape (), where labels are given.
        logits: [B, T, vocab_size] of a language model; [B, num_labels] of a classifier.
        state: as of `SRUPlusPlusModelOutput`, like what follows.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class SRUPlusPlusLayer(GradientCheckpointingLayer):
    """Attention, then the elementwise recurrence; its highway gate is the residual connection."""

    def __init__(self, config: SRUPlusPlusConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = SRUPlusPlusAttention(config, layer_idx)
        d = config.hidden_size
        self.forget_weight = nn.Parameter(torch.empty(d))
        self.forget_bias = nn.Parameter(torch.empty(d))
        self.highway_weight = nn.Parameter(torch.empty(d))
        self.highway_bias = nn.Parameter(torch.empty(d))

    def forward(
        self, hidden: Tensor, memory: Tensor | None, visible: Tensor, cell: Tensor | None, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One layer over a segment.

        Args:
            hidden: as of `SRUPlusPlusAttention.forward`, like `memory` and `visible`.
            memory: likewise.
            visible: likewise.
            cell: as `first` of `elementwise_recurrence`, like `real`.
            real: likewise.

        Returns:
            The outputs, [B, T, d], and the cell behind the segment, [B, d].
        """
        U, _ = self.attention(hidden, memory, visible)
        weights, biases = (self.forget_weight, self.highway_weight), (self.forget_bias, self.highway_bias)
        return elementwise_recurrence(U, hidden, weights, biases, cell, real)


class SRUPlusPlusPreTrainedModel(PreTrainedModel):
    """What all SRU++ models share: initialisation, and what transformers wants to know."""

    config_class = SRUPlusPlusConfig
    config: SRUPlusPlusConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    segment_state: ClassVar[str] = "state"  # argument and output that goes from one segment to the next
    # Entries of the config that every call reads anew, so that they may be others in evaluation than in training.
    memory_settings = ("mem_len",)
    _is_stateful = True
    _supports_sdpa = True
    _no_split_modules = ["SRUPlusPlusLayer"]  # noqa: RUF012  (transformers' own type)
    _skip_keys_device_placement = ["state"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": SRUPlusPlusLayer,
        "attentions": OutputRecorder(SRUPlusPlusAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in the authors' code: Xavier's for matrices, variance 1 / d for embeddings, v between −1 and 1."""
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
        self.layers = nn.ModuleList(SRUPlusPlusLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table."""
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table."""
        self.embeddings = value

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> SRUPlusPlusModelOutput:
        """Hidden states of a segment behind a state.

        Args:
            input_ids: shape [B, T], T ≥ 1.
            attention_mask: shape [B, L], 0 for padding, on either side or between: attention does not see it, and the
                cells pass over it. Its last column is the last token of the segment. L is T, or more to tell which of
                the memory was padding.
            state: what the call on the segment before returned; None: the text begins here.
            inputs_embeds: shape [B, T, d], instead of `input_ids`.
            use_cache: return the state; None: as the config says.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`, an empty segment, a mask shorter than the
                segment, or a state that does not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds.")
        embedded: Tensor = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        B, T = embedded.shape[:2]
        if T < 1 or (attention_mask is not None and (len(attention_mask) != B or attention_mask.shape[-1] < T)):
            mask = None if attention_mask is None else tuple(attention_mask.shape)
            raise ValueError(
                f"input of shape {(B, T)} with an attention_mask of shape {mask}: at least one token, and a mask of "
                "[batch, T or more], is needed."
            )
        L = len(self.layers)
        if state is None:
            before: list[Tensor | None] = [None] * (2 * L)
        else:
            self._require_fitting(state, embedded)
            before = list(state)
        cells, memories = before[:L], before[L:]
        M = 0 if memories[0] is None else memories[0].shape[1]
        visible = visibility(T, M, None, attention_mask, embedded.device)
        real = None if attention_mask is None else attention_mask[:, -T:].bool()
        hidden = self.dropout(embedded)
        seen, last = list[Tensor](), list[Tensor]()
        for layer, cell, memory in zip(self.layers, cells, memories, strict=True):
            seen.append(hidden)
            hidden, cell = layer(hidden, memory, visible, cell, real)
            last.append(cell)
        wanted = self.config.use_cache if use_cache is None else use_cache
        return SRUPlusPlusModelOutput(
            last_hidden_state=self.dropout(hidden), state=self._carried(last, memories, seen) if wanted else None
        )

    def _require_fitting(self, state: Sequence[Tensor], embedded: Tensor) -> None:
        B, _, d = embedded.shape
        L, limit = len(self.layers), self.config.mem_len
        if len(state) != 2 * L:
            raise ValueError(
                f"state has {len(state)} entries; 2 · {L} are needed, the cell and then the memory of each layer."
            )
        M = state[L].shape[1] if state[L].dim() == 3 else 0
        needed = [(B, d)] * L + [(B, M, d)] * L
        dtypes = [working_dtype(embedded)] * L + [embedded.dtype] * L
        for i, (part, shape, dtype) in enumerate(zip(state, needed, dtypes, strict=True)):
            if part.shape != shape:
                raise ValueError(
                    f"state[{i}] has shape {tuple(part.shape)}; {list(shape)} is needed: [batch, hidden_size] of the "
                    f"cells state[:{L}], [batch, positions, hidden_size] of the memories state[{L}:], as many "
                    "positions in all layers."
                )
            if part.dtype != dtype:
                raise ValueError(
                    f"state[{i}] is {part.dtype}; {dtype} is needed for embeddings of {embedded.dtype}. Use the state "
                    "of this model in this dtype, or convert it with .to()."
                )
        if limit < M:
            raise ValueError(
                f"state holds {M} positions, but mem_len={limit}. Set model.config.mem_len to let the model look back "
                f"further, or keep the last {limit} of each state[{L}:]."
            )

    def _carried(
        self, cells: list[Tensor], memories: Sequence[Tensor | None], seen: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """The cells behind the segment, and the last M inputs of each layer."""
        M = self.config.mem_len
        kept = []
        for memory, inputs in zip(memories, seen, strict=True):
            text = inputs if memory is None or inputs.shape[1] >= M else torch.cat([memory, inputs], dim=1)
            kept.append(text[:, max(0, text.shape[1] - M) :].detach())
        return (*(cell.detach() for cell in cells), *kept)
