"""Transformer-XL without a head (Dai et al., 2019, arXiv:1901.02860): layers, memory, and loading.

The memory of a layer are the states that went into it for the last M positions. Each layer attends to its memory and
the segment, so that what a text's position sees grows with every layer, over segments long gone (section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from rsa_hf.models.transformer_xl.adaptive import AdaptiveEmbedding
from rsa_hf.models.transformer_xl.attention import TransformerXLAttention, sinusoids, visibility
from rsa_hf.models.transformer_xl.configuration import TransformerXLConfig
from rsa_hf.models.transformer_xl.layout import require_layout

__all__ = ["TransformerXLHeadOutput", "TransformerXLModel", "TransformerXLModelOutput", "TransformerXLPreTrainedModel"]


@dataclass
class TransformerXLModelOutput(ModelOutput):
    """Output of `TransformerXLModel`.

    Attributes:
        last_hidden_state: shape [B, T, d_model].
        mems: for each layer the last M of the states that went into it, [B, M, d_model].
        hidden_states: the embeddings and the output of each layer, [B, T, d_model].
        attentions: the softmax half of each layer, [B, H, T, S]; with eager attention.
    """

    last_hidden_state: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class TransformerXLHeadOutput(ModelOutput):
    """Output of the models with a head.

    Attributes:
        loss: shape (), where labels are given.
        logits: [B, T, V], log-probabilities, of a language model; [B, num_labels] of a classifier.
        mems: as of `TransformerXLModelOutput`, like what follows.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class TransformerXLFeedForward(nn.Module):
    """Two linear layers at each position, with residual and layer normalisation."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.CoreNet = nn.Sequential(
            nn.Linear(config.d_model, config.d_inner),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(config.d_inner, config.d_model),
            nn.Dropout(config.dropout),
        )
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, d_model] → [B, T, d_model]."""
        if self.pre_lnorm:
            return cast(Tensor, hidden + self.CoreNet(self.layer_norm(hidden)))
        return cast(Tensor, self.layer_norm(hidden + self.CoreNet(hidden)))


class TransformerXLLayer(GradientCheckpointingLayer):
    """Attention over memory and segment, then the feed-forward layer."""

    def __init__(self, config: TransformerXLConfig, layer_idx: int) -> None:
        super().__init__()
        self.dec_attn = TransformerXLAttention(config, layer_idx)
        self.pos_ff = TransformerXLFeedForward(config)

    def forward(
        self, hidden: Tensor, memory: Tensor | None, positions: Tensor, visible: Tensor, biases: tuple[Tensor, Tensor]
    ) -> Tensor:
        """As `TransformerXLAttention.forward`, without the weights."""
        return cast(Tensor, self.pos_ff(self.dec_attn(hidden, memory, positions, visible, biases)[0]))


class TransformerXLPreTrainedModel(PreTrainedModel):
    """What all Transformer-XL models share: loading, initialisation, and what transformers wants to know."""

    config_class = TransformerXLConfig
    base_model_prefix = "transformer"
    # Entries of the config that every call reads anew, so that they may be others in evaluation than in training.
    memory_settings = ("mem_len", "same_length", "clamp_len")
    supports_gradient_checkpointing = True
    segment_state: ClassVar[str] = "mems"  # argument and output that goes from one segment to the next
    _supports_sdpa = True
    _no_split_modules = ["TransformerXLLayer"]  # noqa: RUF012  (transformers' own type)
    _skip_keys_device_placement = ["mems"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TransformerXLLayer,
        "attentions": OutputRecorder(TransformerXLAttention, index=1),
    }
    # transformers 4 also saved what is computed, and biases that all layers share once more for each of them.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"pos_emb\.inv_freq$",
        r"layers\.\d+\.dec_attn\.r_[rw]_bias$",
    ]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **keywords: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`, but a checkpoint that does not fill the model is refused.

        Raises:
            ValueError: the checkpoint has another layout.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **keywords)
        model, info = loaded
        require_layout(model, set(info["missing_keys"]), set(info["unexpected_keys"]))
        return (model, info) if output_loading_info else model

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **keywords: Any) -> nn.Embedding:
        """As `PreTrainedModel.resize_token_embeddings`, of a model without cutoffs.

        Raises:
            NotImplementedError: the model has cutoffs: tokens are sorted by frequency there, so none can be added.
        """
        if self.config.cutoffs and new_num_tokens not in (None, self.config.vocab_size):
            raise NotImplementedError(
                f"cutoffs={self.config.cutoffs}: an adaptive vocabulary is sorted by frequency and cannot be resized. "
                "Build a model with another vocab_size, or without cutoffs."
            )
        return super().resize_token_embeddings(new_num_tokens, *args, **keywords)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm) and name == "weight":
                init.normal_(parameter, mean=1.0, std=config.init_std)
            elif name in ("bias", "cluster_bias"):
                init.zeros_(parameter)
            else:
                init.normal_(
                    parameter, std=config.proj_init_std if isinstance(module, nn.ParameterList) else config.init_std
                )


class TransformerXLModel(TransformerXLPreTrainedModel):
    """Transformer-XL without a head."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.word_emb = AdaptiveEmbedding(config)
        self.drop = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerXLLayer(config, i) for i in range(config.n_layer))
        if not config.untie_r:
            self.r_w_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.r_r_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        """The table of embeddings, or the adaptive embedding where there are several."""
        tables = self.word_emb.emb_layers
        return tables[0] if len(tables) == 1 else self.word_emb

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace what `get_input_embeddings` gives."""
        if len(self.word_emb.emb_layers) == 1:
            self.word_emb.emb_layers[0] = value
        else:
            self.word_emb = value  # type: ignore[assignment]

    def init_mems(self, batch_size: int) -> tuple[Tensor, ...] | None:
        """The memory at the beginning of a text: M zero states of each layer with `zero_memory`, else None."""
        config = self.config
        if not (config.zero_memory and config.mem_len):
            return None
        zeros = torch.zeros(batch_size, config.mem_len, config.d_model, dtype=self.dtype, device=self.device)
        return tuple([zeros] * config.n_layer)

    @property
    def rsa_probe_inputs(self) -> dict[str, Any]:
        """A small input with as many keys as queries, for `patch_model`: no zeros before the text."""
        empty = torch.empty(1, 0, self.config.d_model, dtype=self.dtype, device=self.device)
        tokens = torch.arange(1, device=self.device).expand(1, 4)
        return {"input_ids": tokens, "mems": (empty,) * self.config.n_layer}

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> TransformerXLModelOutput:
        """Hidden states of a segment behind a memory.

        Args:
            input_ids: shape [B, T].
            attention_mask: shape [B, L], 0 for padding; its last column is the last token of the segment. L is T, or
                more to tell which of the memory was padding.
            mems: the memory that the segment before returned: for each layer [B, M, d_model], M ≤ `mem_len`. None:
                the text begins here.
            inputs_embeds: shape [B, T, d_model], instead of `input_ids`; not scaled any more.
            use_cache: return the memory for the next segment; None: as the config says.

        Raises:
            ValueError: a memory or segment that does not fit; both or neither of `input_ids` and `inputs_embeds`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds.")
        embedded: Tensor = self.word_emb(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, d_model = embedded.shape
        config = self.config
        if 0 < config.clamp_len < T:
            raise ValueError(
                f"a segment of {T} tokens is longer than clamp_len={config.clamp_len}: distances beyond that look "
                "alike to the model. Feed the text in shorter segments, each with the mems of the one before, or set "
                f"model.config.clamp_len={T} or more."
            )
        if mems is None:
            mems = self.init_mems(B)
        else:
            self._require_fitting(mems, embedded)
        M = 0 if mems is None else mems[0].shape[1]
        visible = visibility(T, M, config.mem_len if config.same_length else None, attention_mask, embedded.device)
        # One distance more than there are keys: see `relative_scores`.
        distances = torch.arange(M + T, -1, -1, device=embedded.device)
        if config.clamp_len > 0:
            distances = distances.clamp(max=config.clamp_len)
        positions = self.drop(sinusoids(distances, d_model).to(embedded.dtype))
        biases = None if config.untie_r else (self.r_w_bias, self.r_r_bias)
        hidden = self.drop(embedded)
        seen = []
        for i, layer in enumerate(self.layers):
            seen.append(hidden)
            hidden = layer(hidden, None if mems is None else mems[i], positions, visible, biases)
        use_cache = config.use_cache if use_cache is None else use_cache
        return TransformerXLModelOutput(
            last_hidden_state=self.drop(hidden), mems=self._remembered(mems, seen) if use_cache else None
        )

    def _require_fitting(self, mems: Sequence[Tensor], embedded: Tensor) -> None:
        config, B = self.config, embedded.shape[0]
        if len(mems) != config.n_layer:
            raise ValueError(f"mems has {len(mems)} entries; one for each of the {config.n_layer} layers is needed.")
        M = mems[0].shape[1] if mems[0].dim() == 3 else 0
        for i, memory in enumerate(mems):
            if memory.shape != (B, M, config.d_model):
                raise ValueError(
                    f"mems[{i}] has shape {tuple(memory.shape)}; [batch, positions, d_model] = [{B}, {M}, "
                    f"{config.d_model}] is needed, in all layers. (transformers 4 had positions first.)"
                )
            if memory.dtype != embedded.dtype and not torch.is_autocast_enabled(embedded.device.type):
                raise ValueError(
                    f"mems[{i}] is {memory.dtype}, but the segment's embeddings are {embedded.dtype}. Use the mems of "
                    "this model in this dtype, or convert them with .to()."
                )
        if config.mem_len < M:
            raise ValueError(
                f"mems hold {M} positions, but mem_len={config.mem_len}. Set model.config.mem_len to let the model "
                f"look back further, or keep the last {config.mem_len}."
            )

    def _remembered(self, mems: Sequence[Tensor] | None, seen: list[Tensor]) -> tuple[Tensor, ...] | None:
        """The last M states that went into each layer, without gradient (paper, section 3.2)."""
        M, T = self.config.mem_len, seen[0].shape[1]
        if not M:
            return None
        if mems is None or M <= T:
            return tuple(states[:, -M:].detach() for states in seen)
        return tuple(
            torch.cat([memory, states], 1)[:, -M:].detach() for memory, states in zip(mems, seen, strict=True)
        )
