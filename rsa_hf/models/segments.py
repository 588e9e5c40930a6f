"""What the models of this package share: the heads, and a state carried from one segment of a text to the next.

    state = None
    for segment in segments:
        outputs = model(segment, **{model.segment_state: state})
        state = outputs[model.segment_state]

The `forward` of each model takes

* `input_ids`, [B, T], or `inputs_embeds`, [B, T, n];
* `attention_mask`, [B, L], 0 for padding; its last column is the last token of the segment. L is T, or larger to mask
  padding in the memory too. None: there is no padding;
* the state, which each model describes. None: the text begins here;
* `use_cache`, whether to return the state, and `output_hidden_states`; None: as the config says.

It raises a ValueError for both or neither of `input_ids` and `inputs_embeds`, and for a state of another model or
batch size. A state is a tuple of tensors with the batch on dimension 0, detached: gradients end where a segment begins
(truncated back-propagation through time). CONTRIBUTING.md describes the class attributes `segment_state` and
`memory_settings`, which tell training, evaluation and generation about the state.

Notation: B rows, T tokens, V words, n channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils.generic import ModelOutput, can_return_tuple

from rsa_hf.utils.versions import CACHE


@strict
class SegmentConfig(PreTrainedConfig):
    """Fields that the configs of these models share."""

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["mems", "state"]

    use_cache: bool = True  # whether to return the state
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


@dataclass
class SegmentOutput(ModelOutput):
    """Output of a model that carries a state, `mems` or `state`; see the `forward` of each model."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, T, V] of a language model, [B, num_labels] of a classifier
    last_hidden_state: Tensor | None = None  # [B, T, n] of a model without a head
    mems: tuple[Tensor, ...] | None = None
    state: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None  # the embeddings and the output of each layer, [B, T, n]
    attentions: tuple[Tensor, ...] | None = None  # the weights of each layer, [B, heads, T, keys], if eager


class SegmentPreTrainedModel(PreTrainedModel):
    """Base class of models that carry a state: what transformers, training and evaluation need to know about them."""

    base_model_prefix = "model"
    segment_state: ClassVar[str] = "state"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _skip_keys_device_placement = ["mems", "state"]  # noqa: RUF012  (transformers' own type)
    _input_embed_layer = "embeddings"

    @staticmethod
    def embed(embedding: Callable[[Tensor], Tensor], input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The embeddings of `input_ids`, or `inputs_embeds`; exactly one of them is given."""
        if inputs_embeds is None and input_ids is not None:
            return embedding(input_ids)
        if inputs_embeds is None or input_ids is not None:
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        return inputs_embeds


def require_shapes(name: str, parts: Sequence[Tensor], needed: Sequence[tuple[int, ...]]) -> None:
    """Raise a ValueError if a state belongs to another model or batch size."""
    found = [tuple(part.shape) for part in parts]
    if found != list(needed):
        raise ValueError(
            f"{name} has shapes {found}; {list(needed)} are needed. Pass what this model returned for the segment "
            "before, with the same rows."
        )


class SegmentModelWithHead(SegmentPreTrainedModel):
    """The base model that is registered for the config, and a head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        base_models: Any = MODEL_MAPPING
        setattr(self, self.base_model_prefix, base_models[self.config_class](config))
        self.build_head(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def build_head(self, config: Any) -> None:
        """Make the modules of the head."""
        raise NotImplementedError


class SegmentForCausalLM(SegmentModelWithHead, GenerationMixin):
    """A language model: a base model, and a linear layer over the next token. A state replaces the cache."""

    # The state cannot be rewound, as assisted generation would need.
    _is_stateful = True
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012  (transformers' own type)

    def build_head(self, config: Any) -> None:
        """The softmax."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    # `shift_labels` is not a named argument: the Trainer requires every argument with "label" in its name.
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> SegmentOutput:
        """Logits of the next token, and the loss.

        Takes the arguments of the base model; `labels`, [B, T], the tokens themselves (shifted here), or
        `shift_labels`, the token that follows each position; and `logits_to_keep`, how many of the last positions get
        logits, or their indices. Label −100 is ignored. With `num_items_in_batch`, the loss is the sum divided by it.
        """
        outputs: Any = self.base_model(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.predict(outputs.last_hidden_state, kept, labels, **kwargs)
        return replace(outputs, last_hidden_state=None, logits=logits, loss=loss)  # type: ignore[no-any-return]

    def predict(
        self, hidden: Tensor, kept: slice | Tensor, labels: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the positions `kept`, and the loss of hidden states [B, T, n]."""
        logits = self.lm_head(hidden[:, kept])
        if labels is None and kwargs.get("shift_labels") is None:
            return logits, None
        return logits, self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _reorder_cache(self, parts: Sequence[Tensor] | None, beams: Tensor) -> tuple[Tensor, ...] | None:
        return None if parts is None else tuple(part.index_select(0, beams.to(part.device)) for part in parts)

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """Keep the state where beam search looks for a cache."""
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return {**updated, CACHE: outputs.get(self.segment_state)}

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:  # type: ignore[override]
        """Repeat the state for beams and several sequences per row: transformers repeats tensors, not tuples."""
        if kwargs.get(self.segment_state) is not None:
            parts = kwargs[self.segment_state]
            kwargs[self.segment_state] = tuple(part.repeat_interleave(expand_size, dim=0) for part in parts)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        mems: Sequence[Tensor] | None = None,
        state: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The next segment: all tokens, or only the last one if there is a state for the tokens before it."""
        state = next((given for given in (kwargs.get(CACHE), mems, state) if given is not None), None)
        inputs = {"attention_mask": attention_mask, self.segment_state: state, "use_cache": use_cache}
        inputs |= {name: kwargs[name] for name in ("output_hidden_states", "output_attentions") if name in kwargs}
        if is_first_iteration and inputs_embeds is not None:
            return {**inputs, "inputs_embeds": inputs_embeds}
        only_last = not is_first_iteration and use_cache and state is not None
        return {**inputs, "input_ids": input_ids[:, -1:] if only_last else input_ids}


class SegmentForSequenceClassification(SegmentModelWithHead):
    """A classifier of sequences: a base model and a linear layer on the last token that is not padding."""

    # The loss is a mean over rows: the Trainer has to divide it by the number of accumulated batches.
    accepts_loss_kwargs = False

    def build_head(self, config: Any) -> None:
        """The classifier."""
        self.score = nn.Linear(config.hidden_size, config.num_labels or 0, bias=False)

    def features(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """What is classified: from hidden states [B, T, n] to [B, n]."""
        return at_last_token(hidden, attention_mask)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SegmentOutput:
        """Scores of the classes, [B, num_labels], and the loss.

        Takes the arguments of the base model, and `labels`, shape [B] or [B, num_labels], depending on `problem_type`.
        Without `attention_mask`, `pad_token_id` at the end of a row is padding.
        """
        pad = self.config.pad_token_id
        if attention_mask is None and input_ids is not None and pad is not None:
            attention_mask = (input_ids != pad).long().flip(1).cummax(1).values.flip(1)
        outputs: Any = self.base_model(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.score(self.features(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return replace(outputs, last_hidden_state=None, logits=logits, loss=loss)  # type: ignore[no-any-return]


def at_last_token(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The hidden states of each row's last token that is not padding: [B, T, n] → [B, n]."""
    if attention_mask is None:
        return hidden[:, -1]
    B, T, _ = hidden.shape
    last = (attention_mask[:, -T:].bool() * torch.arange(T, device=hidden.device)).argmax(dim=1)
    return hidden[torch.arange(B, device=hidden.device), last]
