r"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860), to be read beside the paper.

Notation: B rows, T queries, M positions of memory, S = M + T keys, H heads of width D. Query t stands at position
M + t of the key axis; its distance to key s is M + t − s. Section 3.3 gives the score of query t and key s as

    A[t, s] = (q_t + u)ᵀ k_s + (q_t + v)ᵀ r_{M + t − s}        r_i = W_r R_i, R_i sinusoids of the distance i

The first half is ordinary attention with queries q + u. The second is a bias on its scores, so attention goes through
transformers' attention interface (`position_bias`), with a boolean mask that says who sees whom. RSA heads read that
mask like any other, and so their P has T rows and S columns, and the window of `same_length`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from rsa_hf.models.transformer_xl.adaptive import AdaptiveEmbedding, AdaptiveLogSoftmax, tied_parameters
from rsa_hf.models.transformer_xl.configuration import TransformerXLConfig
from rsa_hf.models.transformer_xl.layout import require_layout

__all__ = [
    "TransformerXLForCausalLM",
    "TransformerXLForSequenceClassification",
    "TransformerXLModel",
    "TransformerXLPreTrainedModel",
]


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


def sinusoids(distances: Tensor, d_model: int) -> Tensor:
    """R: half sines, half cosines, of wavelengths 2π … 10000·2π. [N] → [N, d_model], float32."""
    frequencies = 10000.0 ** (-torch.arange(0, d_model, 2, device=distances.device) / d_model)
    angles = distances.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def relative_scores(query: Tensor, position: Tensor) -> Tensor:
    """Scores of each query with the position of each key (paper, appendix B), for the keys that it may see.

    Entry [t, s] of the result is entry [t, T − 1 − t + s] of the product with all distances, so row t is the product's
    shifted by T − 1 − t. With one distance more than there are keys, rows of S + 1 read as rows of S from entry T on
    are shifted so: a view, no copy.

    Args:
        query: q + v, shape [B, H, T, D].
        position: r of the distances S … 0, shape [H, S + 1, D].

    Returns:
        Shape [B, H, T, S]; where s > M + t it means nothing.
    """
    B, H, T, D = query.shape
    R = position.shape[1]
    scores = query.transpose(0, 1).reshape(H, B * T, D) @ position.transpose(1, 2)
    return scores.view(H, B, T * R)[..., T:].view(H, B, T, R - 1).transpose(0, 1)


def visibility(T: int, M: int, window: int | None, attention_mask: Tensor | None, device: torch.device) -> Tensor:
    """Which keys each query sees: itself and what is before it, within the window, but no padding.

    Args:
        T: number of queries.
        M: positions of memory before them.
        window: number of positions back that a query sees, itself included; None: all.
        attention_mask: shape [B, L], 0 for padding; its last column is the last key, and keys before its first are real.
        device: where to build it.

    Returns:
        Shape [B or 1, 1, T, S], boolean.
    """
    S = M + T
    distance = M + torch.arange(T, device=device)[:, None] - torch.arange(S, device=device)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if attention_mask is None:
        return visible[None, None]
    real = attention_mask[:, -S:].bool()
    return visible & F.pad(real, (S - real.shape[1], 0), value=True)[:, None, None, :]


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    position_bias: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out: output [B, T, H, D] and weights [B, H, T, S]."""
    scores = query @ key.transpose(2, 3) * scaling + position_bias
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class TransformerXLAttention(nn.Module):
    """Attention over the memory and the segment with relative positions, with residual and layer normalisation."""

    is_causal = True

    def __init__(self, config: TransformerXLConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.d_head**-0.5
        inner = config.n_head * config.d_head
        self.qkv_net = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.r_net = nn.Linear(config.d_model, inner, bias=False)
        self.o_net = nn.Linear(inner, config.d_model, bias=False)
        self.drop = nn.Dropout(config.dropout)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        if config.untie_r:
            self.r_w_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.r_r_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))

    def forward(
        self, hidden: Tensor, memory: Tensor | None, positions: Tensor, visible: Tensor, biases: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """One layer's attention.

        Args:
            hidden: the segment, [B, T, d_model].
            memory: what the layer saw before it, [B, M, d_model].
            positions: R of the distances S … 0, [S + 1, d_model].
            visible: [B or 1, 1, T, S].
            biases: u and v where all layers share them, [H, D].

        Returns:
            [B, T, d_model], and the attention weights [B, H, T, S] or None.
        """
        B, T, _ = hidden.shape
        heads = (self.config.n_head, self.config.d_head)
        text = hidden if memory is None else torch.cat([memory, hidden], dim=1)
        text = self.layer_norm(text) if self.config.pre_lnorm else text
        query, key, value = self.qkv_net(text).unflatten(-1, (3, *heads)).permute(2, 0, 3, 1, 4)
        query = query[:, :, -T:]
        position = self.r_net(positions).unflatten(-1, heads).transpose(0, 1)
        u, v = (self.r_w_bias, self.r_r_bias) if self.config.untie_r else biases
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query + u[:, None],
            key,
            value,
            visible,
            position_bias=relative_scores((query + v[:, None]) * self.scaling, position),
            scaling=self.scaling,
            dropout=self.config.dropatt if self.training else 0.0,
        )
        hidden = hidden + self.drop(self.o_net(output.reshape(B, T, -1)))
        return hidden if self.config.pre_lnorm else self.layer_norm(hidden), weights


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
            return hidden + self.CoreNet(self.layer_norm(hidden))
        return self.layer_norm(hidden + self.CoreNet(hidden))


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
        return self.pos_ff(self.dec_attn(hidden, memory, positions, visible, biases)[0])


class TransformerXLPreTrainedModel(PreTrainedModel):
    """What all Transformer-XL models share: loading, initialisation, and what transformers wants to know."""

    config_class = TransformerXLConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
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
        model, info = super().from_pretrained(*args, output_loading_info=True, **keywords)
        require_layout(model, set(info["missing_keys"]), set(info["unexpected_keys"]))
        return (model, info) if output_loading_info else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm) and name == "weight":
                init.normal_(parameter, mean=1.0, std=config.init_std)
            elif name in ("bias", "cluster_bias"):
                init.zeros_(parameter)
            else:
                init.normal_(parameter, std=config.proj_init_std if isinstance(module, nn.ParameterList) else config.init_std)


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
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of embeddings, or the adaptive embedding where there are several."""
        tables = self.word_emb.emb_layers
        return tables[0] if len(tables) == 1 else self.word_emb

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace what `get_input_embeddings` gives."""
        if len(self.word_emb.emb_layers) == 1:
            self.word_emb.emb_layers[0] = value
        else:
            self.word_emb = value

    def init_mems(self, batch_size: int) -> tuple[Tensor, ...] | None:
        """The memory at the beginning of a text: M zero states of each layer with `zero_memory`, else None."""
        config = self.config
        if not (config.zero_memory and config.mem_len):
            return None
        zeros = torch.zeros(batch_size, config.mem_len, config.d_model, dtype=self.dtype, device=self.device)
        return (zeros,) * config.n_layer

    @property
    def rsa_probe_inputs(self) -> dict[str, Any]:
        """A small input with as many keys as queries, for `patch_model`: no zeros before the text."""
        empty = torch.empty(1, 0, self.config.d_model, dtype=self.dtype, device=self.device)
        tokens = torch.arange(1, device=self.device).expand(1, 4)
        return {"input_ids": tokens, "mems": (empty,) * self.config.n_layer}

    @capture_outputs
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
                f"a segment of {T} tokens is longer than clamp_len={config.clamp_len}: distances beyond that look alike "
                "to the model. Feed the text in shorter segments, each with the mems of the one before, or set "
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
        if M > config.mem_len:
            raise ValueError(
                f"mems hold {M} positions, but mem_len={config.mem_len}. Set model.config.mem_len to let the model look "
                f"back further, or keep the last {config.mem_len}."
            )

    def _remembered(self, mems: Sequence[Tensor] | None, seen: list[Tensor]) -> tuple[Tensor, ...] | None:
        """The last M states that went into each layer, without gradient (paper, section 3.2)."""
        M, T = self.config.mem_len, seen[0].shape[1]
        if not M:
            return None
        if mems is None or M <= T:
            return tuple(states[:, -M:].detach() for states in seen)
        return tuple(torch.cat([memory, states], 1)[:, -M:].detach() for memory, states in zip(mems, seen, strict=True))


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, GenerationMixin):
    """Transformer-XL with an adaptive (or, without cutoffs, plain) softmax over the next token."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.transformer = TransformerXLModel(config)
        self.crit = AdaptiveLogSoftmax(config)
        self._tied_weights_keys = {
            f"crit.{target}": f"transformer.word_emb.{source}" for target, source in tied_parameters(config).items()
        }
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Projections are tied by a setting of their own, so this does not depend on `tie_word_embeddings` alone."""
        return dict(self._tied_weights_keys)

    def get_output_embeddings(self) -> nn.Module | None:
        """The softmax's layer, where there is one."""
        return self.crit.out_layers[0] if len(self.crit.out_layers) == 1 else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace what `get_output_embeddings` gives."""
        self.crit.out_layers[0] = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **keywords: Any,
    ) -> TransformerXLHeadOutput:
        """Log-probabilities of the next token, and the loss.

        Args:
            input_ids: as of `TransformerXLModel.forward`, like what is not named here.
            attention_mask: likewise.
            mems: likewise.
            inputs_embeds: likewise.
            labels: shape [B, T], the tokens themselves (they are shifted here); −100 is not counted.
            use_cache: as of `TransformerXLModel.forward`.
            logits_to_keep: number of last positions to compute logits of, or which; 0: all.
            num_items_in_batch: what to divide the summed loss by, where a batch is one part of a larger one; None:
                the labels counted.
            **keywords: `output_hidden_states`, `output_attentions`.

        Returns:
            With labels, a model in training mode with an adaptive softmax gives no logits: not to compute those of
            every word is what it is for.
        """
        outputs = self.transformer(input_ids, attention_mask, mems, inputs_embeds, use_cache, **keywords)
        hidden = outputs.last_hidden_state
        loss = None if labels is None else self._loss(hidden[:, :-1], labels[:, 1:], num_items_in_batch)
        logits = None
        if loss is None or not self.training or not self.config.cutoffs:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.crit(hidden[:, kept])
        return TransformerXLHeadOutput(
            loss=loss,
            logits=logits,
            mems=outputs.mems,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, hidden: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        counted = labels != -100
        total = self.crit.negative_log_likelihood(hidden[counted], labels[counted]).sum()
        if num_items_in_batch is not None:
            return total / torch.as_tensor(num_items_in_batch, device=total.device)
        return total / counted.sum().clamp(min=1)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = None,
        **keywords: Any,
    ) -> dict[str, Any]:
        """The next segment: all tokens, or those behind the memory, which `generate` calls `past_key_values`."""
        if past_key_values is not None and next_sequence_length is not None:
            input_ids, mems = input_ids[:, -next_sequence_length:], past_key_values
        inputs = {"inputs_embeds": inputs_embeds} if is_first_iteration and inputs_embeds is not None else {}
        return {
            **(inputs or {"input_ids": input_ids}),
            "attention_mask": attention_mask,
            "mems": mems,
            "use_cache": use_cache,
            **{name: value for name, value in keywords.items() if name != "labels"},
        }

    def _reorder_cache(self, mems: Sequence[Tensor] | None, beams: Tensor) -> tuple[Tensor, ...] | None:
        return None if mems is None else tuple(memory.index_select(0, beams.to(memory.device)) for memory in mems)


class TransformerXLForSequenceClassification(TransformerXLPreTrainedModel):
    """Transformer-XL with a linear classifier on the last token that is not padding."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = TransformerXLModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **keywords: Any,
    ) -> TransformerXLHeadOutput:
        """Scores of the classes [B, num_labels], and the loss.

        Args:
            input_ids: as of `TransformerXLModel.forward`, like what is not named here.
            attention_mask: likewise; it tells the last token. Without it `pad_token_id` does.
            mems: likewise.
            inputs_embeds: likewise.
            labels: shape [B], or [B, num_labels], as `problem_type` needs.
            use_cache: as of `TransformerXLModel.forward`.
            **keywords: `output_hidden_states`, `output_attentions`.
        """
        outputs = self.transformer(input_ids, attention_mask, mems, inputs_embeds, use_cache, **keywords)
        hidden = outputs.last_hidden_state
        logits = self.score(hidden[torch.arange(len(hidden)), self._last_token(hidden, input_ids, attention_mask)])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return TransformerXLHeadOutput(
            loss=loss,
            logits=logits,
            mems=outputs.mems,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _last_token(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """The place in the segment of each row's last token that is not padding: [B]."""
        T, pad = hidden.shape[1], self.config.pad_token_id
        if attention_mask is not None:
            real = attention_mask[:, -T:].bool()
        elif input_ids is not None and pad is not None:
            real = input_ids != pad
        else:
            real = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        return (real * torch.arange(T, device=hidden.device)).argmax(dim=1)
