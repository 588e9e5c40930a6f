"""The Block-Recurrent Transformer without a head (Hutchins et al., 2022, arXiv:2203.07852).

Layers of windowed attention, of which some are recurrent. A text may be cut into segments anywhere: what a segment
returns as `mems` goes into the next one, and the numbers are those of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput
from transformers.utils.output_capturing import capture_outputs

from rsa_hf.models.block_recurrent.attention import RelativeBias, WindowAttention
from rsa_hf.models.block_recurrent.configuration import BlockRecurrentConfig
from rsa_hf.models.block_recurrent.recurrence import FixedGate, GateLinear, RecurrentAttention, StateCell
from rsa_hf.models.block_recurrent.windows import Window, cut

__all__ = ["BlockRecurrentModel", "BlockRecurrentOutput", "BlockRecurrentPreTrainedModel"]


@dataclass
class BlockRecurrentOutput(ModelOutput):
    """What the Block-Recurrent Transformers return.

    Attributes:
        loss: with labels.
        logits: [B, T, V] of a language model, [B, num_labels] of a classifier.
        last_hidden_state: of the bare model, [B, T, d_model].
        mems: for each layer keys and values of the last C positions, [B, 2, H, C, D], C < 2W; then for each recurrent
            layer its states, [B, N, d_model]. Detached.
        hidden_states: the embeddings and each layer's output, [B, T, d_model].
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class BlockRecurrentLayer(GradientCheckpointingLayer):
    """Attention, of which a recurrent layer has its own kind, and a feed-forward layer."""

    def __init__(self, config: BlockRecurrentConfig, layer_idx: int) -> None:
        super().__init__()
        d_model, epsilon = config.d_model, config.layer_norm_epsilon
        self.attn_norm = nn.RMSNorm(d_model, eps=epsilon)
        recurrent = layer_idx in config.recurrent_places
        self.attn = RecurrentAttention(config) if recurrent else WindowAttention(config, layer_idx)
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


class BlockRecurrentPreTrainedModel(PreTrainedModel):
    """What all Block-Recurrent Transformers share: initialisation, and what transformers wants to know."""

    config_class = BlockRecurrentConfig
    config: BlockRecurrentConfig
    base_model_prefix = "model"
    segment_state = "mems"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["BlockRecurrentLayer"]  # noqa: RUF012  (transformers' own type)
    _skip_keys_device_placement = ["mems"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": BlockRecurrentLayer}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the authors' program has it: variance 1 / width, and what `recurrence.py` says of gates and states."""
        if isinstance(module, GateLinear):
            init.trunc_normal_(module.weight, std=(0.1 / module.in_features) ** 0.5)
            init.normal_(module.bias, std=0.1)
        elif isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            # So that tied logits have variance 1.
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, RelativeBias):
            init.normal_(module.weight, std=len(module.weight) ** -0.5)
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
    ) -> BlockRecurrentOutput:
        """Hidden states of a segment behind a memory.

        Args:
            input_ids: shape [B, T].
            attention_mask: shape [B, L], 0 for padding; its last column is the last token of the segment. L is T, or
                more to tell which of the memory was padding. Padding takes part in the count of windows: in front of a
                text it changes nothing in multiples of W, behind it in any number.
            mems: what the segment before returned. None: the text begins here.
            inputs_embeds: shape [B, T, d_model], in place of `input_ids`.
            use_cache: return the memory; None: as the config says.

        Raises:
            ValueError: a memory that does not fit; both or neither of `input_ids` and `inputs_embeds`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds.")
        config = self.config
        hidden: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if mems is not None:
            self._require_fitting(mems, hidden)
        L, places = config.n_layer, config.recurrent_places
        caches = [None] * L if mems is None else mems[:L]
        states = {} if mems is None else dict(zip(places, mems[L:], strict=True))
        windows = cut(
            hidden.shape[1],
            0 if mems is None else mems[0].shape[3],
            config.window_size,
            attention_mask,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            hidden.device,
        )
        hidden = self.drop(hidden)
        next_caches, next_states = [], []
        for i, layer in enumerate(self.layers):
            hidden, cache, state = layer(hidden, caches[i], windows, states.get(i))
            # Not within the layer: what reentrant checkpointing returns of it has a gradient all the same.
            next_caches.append(cache.detach())
            if state is not None:
                next_states.append(state.detach())
        use_cache = config.use_cache if use_cache is None else use_cache
        return BlockRecurrentOutput(
            last_hidden_state=self.drop(self.norm(hidden)),
            mems=(*next_caches, *next_states) if use_cache else None,
        )

    def _require_fitting(self, mems: Sequence[Tensor], embedded: Tensor) -> None:
        config, B = self.config, embedded.shape[0]
        L, R, W = config.n_layer, len(config.recurrent_places), config.window_size
        if len(mems) != L + R:
            raise ValueError(
                f"mems has {len(mems)} entries; one for each of the {L} layers is needed, then one for each of the "
                f"{R} recurrent layers."
            )
        C = mems[0].shape[3] if mems[0].dim() == 5 else 0
        cache, state = (B, 2, config.n_head, C, config.d_head), (B, config.num_state_vectors, config.d_model)
        for i, memory in enumerate(mems):
            needed, axes = (
                (cache, "batch, 2, heads, positions, d_head") if i < L else (state, "batch, states, d_model")
            )
            if memory.shape != needed:
                raise ValueError(
                    f"mems[{i}] has shape {tuple(memory.shape)}; [{axes}] = {list(needed)} is needed, with as many "
                    "positions in all layers."
                )
            if memory.dtype != embedded.dtype and not torch.is_autocast_enabled(embedded.device.type):
                raise ValueError(
                    f"mems[{i}] is {memory.dtype}, but the segment's embeddings are {embedded.dtype}. Use the mems of "
                    "this model in this dtype, or convert them with .to()."
                )
        if C >= 2 * W:
            raise ValueError(
                f"mems hold {C} positions; with window_size={W} there are at most {2 * W - 1}: a full window, and "
                "what there is of the next. Give mems as the model returned them."
            )
