"""Recurrent networks as language models and as classifiers of sequences.

A text may be cut into segments: the state that a call returns goes into the next one. It is detached, so gradients
end where a segment begins (truncated back-propagation through time).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput, can_return_tuple

from rsa_hf.models.generation import StateGenerationMixin
from rsa_hf.models.last_token import at_last_token, mask_until_last_token
from rsa_hf.models.recurrent.configuration import RecurrentConfig
from rsa_hf.models.recurrent.layer import RecurrentLayer

__all__ = ["RecurrentForCausalLM", "RecurrentForSequenceClassification", "RecurrentModel", "RecurrentOutput"]

State = tuple[Tensor, ...]


@dataclass
class RecurrentOutput(ModelOutput):
    """What the recurrent networks return.

    Attributes:
        loss: with labels.
        logits: [B, T, vocab_size], or [B, num_labels] of a classifier.
        last_hidden_state: of the bare network, [B, T, n], or 2n where it is bidirectional.
        state: of each layer, [B, k, d, n], detached unless asked otherwise; [B, 2k, d, n] where bidirectional.
        hidden_states: the embeddings and each layer's output.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    state: State | None = None
    hidden_states: State | None = None


class RecurrentPreTrainedModel(PreTrainedModel):
    """Weights and gradients of all recurrent networks."""

    config_class = RecurrentConfig
    config: RecurrentConfig
    base_model_prefix = "model"
    segment_state: ClassVar[str] = "state"  # argument and output that goes from one segment to the next
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.RNNBase):
            if not getattr(module.weight_hh_l0, "_is_hf_initialized", False):
                module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[no-untyped-call]


class RecurrentModel(RecurrentPreTrainedModel):
    """Embedding and recurrent layers, without a head."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        n = config.hidden_size
        self.embeddings: nn.Module = nn.Embedding(config.vocab_size, n, padding_idx=config.pad_token_id)
        width = 2 * n if config.bidirectional else n
        assert config.dilations is not None
        self.layers = nn.ModuleList(
            RecurrentLayer(config.cell, width if i else n, n, d, config.bidirectional)
            for i, d in enumerate(config.dilations)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table."""
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table."""
        self.embeddings = value

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        detach_state: bool = True,
        **_: Any,
    ) -> RecurrentOutput:
        """Hidden states of a segment.

        Args:
            input_ids: shape [B, T].
            attention_mask: shape [B, T] or longer, its last T columns are read; 0 for padding, on either side or
                between: a state passes over it. None: no padding.
            state: what the call on the segment before returned; None: the text begins here.
            inputs_embeds: shape [B, T, n], in place of `input_ids`.
            use_cache: return the state; None: as the config says.
            output_hidden_states: return the embeddings and every layer's output.
            detach_state: gradients end where the segment ends; False: they come back through the state.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`, or a state that does not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        hidden: Tensor = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        states = self._checked(state, hidden)
        order, lengths = self._real_first(attention_mask, hidden)
        hidden = self.dropout(hidden)
        all_hidden, last = [hidden], list[Tensor]()
        if order is not None:
            hidden = hidden.gather(1, order[..., None].expand_as(hidden))
        for layer, before in zip(self.layers, states, strict=True):
            hidden, after = layer(hidden, lengths, before)
            hidden = self.dropout(hidden)
            all_hidden.append(hidden if order is None else _put_back(hidden, order))
            last.append(after.detach() if detach_state else after)
        wanted = self.config.use_cache if use_cache is None else use_cache
        return RecurrentOutput(
            last_hidden_state=all_hidden[-1],
            state=tuple(last) if wanted else None,
            hidden_states=tuple(all_hidden) if output_hidden_states else None,
        )

    def _real_first(self, attention_mask: Tensor | None, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The order [B, T] that puts real tokens before padding, and how many of them there are [B]; or None."""
        if attention_mask is None:
            return None, None
        real = attention_mask[:, -hidden.shape[1] :].bool()
        if bool(real.all()):
            return None, None
        return (~real).int().argsort(dim=1, stable=True), real.sum(dim=1)

    def _checked(self, state: Sequence[Tensor] | None, hidden: Tensor) -> Sequence[Tensor | None]:
        if state is None:
            return [None] * len(self.layers)
        if self.config.bidirectional:
            raise ValueError("a bidirectional network takes no state: it would have to come from the end, too.")
        layers = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        needed = [(len(hidden), layer.parts, layer.dilation, layer.hidden_size) for layer in layers]
        found = [tuple(part.shape) for part in state]
        if found != needed:
            raise ValueError(f"state has shapes {found}; [batch, parts, dilation, hidden_size] is needed: {needed}.")
        return list(state)


def _put_back(x: Tensor, order: Tensor) -> Tensor:
    """Undo `x.gather(1, order)`."""
    index = order[..., None].expand_as(x)
    return torch.empty_like(x).scatter(1, index, x)


class RecurrentForCausalLM(RecurrentPreTrainedModel, StateGenerationMixin):
    """A recurrent network that predicts the next token.

    Raises:
        ValueError: the config is bidirectional.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012  (as transformers declares it)

    def __init__(self, config: RecurrentConfig) -> None:
        if config.bidirectional:
            raise ValueError("a language model cannot be bidirectional: it would see what it is to predict.")
        super().__init__(config)
        self.model = RecurrentModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **keywords: Any,
    ) -> RecurrentOutput:
        """Logits of the next token, and the loss.

        Args:
            input_ids: as of `RecurrentModel.forward`, like what is not named here.
            attention_mask: likewise.
            state: likewise.
            inputs_embeds: likewise.
            labels: shape [B, T], the tokens themselves (they are shifted here); −100 is not counted.
            logits_to_keep: number of last positions to compute logits of, or which; 0: all.
            use_cache: as of `RecurrentModel.forward`.
            output_hidden_states: likewise.
            **keywords: for the loss, e.g. `num_items_in_batch`.
        """
        outputs = self.model(
            input_ids, attention_mask, state, inputs_embeds, use_cache, output_hidden_states=output_hidden_states
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **keywords)
        return RecurrentOutput(loss=loss, logits=logits, state=outputs.state, hidden_states=outputs.hidden_states)


class RecurrentForSequenceClassification(RecurrentPreTrainedModel):
    """A recurrent network with a linear classifier on the last real token; of the way back, on the first."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = RecurrentModel(config)
        self.score = nn.Linear((1 + config.bidirectional) * config.hidden_size, config.num_labels or 0)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> RecurrentOutput:
        """Scores of the classes, [B, num_labels], and the loss.

        Args:
            input_ids: as of `RecurrentModel.forward`, like what is not named here.
            attention_mask: likewise; without it every token is real, but for `pad_token_id` at the end.
            state: likewise.
            inputs_embeds: likewise.
            labels: shape [B], or [B, num_labels], as `problem_type` needs.
            use_cache: as of `RecurrentModel.forward`.
            output_hidden_states: likewise.
        """
        attention_mask = mask_until_last_token(attention_mask, input_ids, self.config.pad_token_id)
        outputs = self.model(
            input_ids, attention_mask, state, inputs_embeds, use_cache, output_hidden_states=output_hidden_states
        )
        forwards, backwards = outputs.last_hidden_state.tensor_split([self.config.hidden_size], dim=2)
        features = [at_last_token(forwards, attention_mask)]
        if self.config.bidirectional:
            # The way back ends at the first token.
            tokens = None if attention_mask is None else attention_mask[:, -backwards.shape[1] :].flip(1)
            features.append(at_last_token(backwards.flip(1), tokens))
        logits = self.score(torch.cat(features, dim=-1))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return RecurrentOutput(loss=loss, logits=logits, state=outputs.state, hidden_states=outputs.hidden_states)
