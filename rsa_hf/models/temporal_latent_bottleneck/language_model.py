"""Temporal Latent Bottleneck as a language model: loss, and generation that goes on within a chunk."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.generation import StateGenerationMixin
from rsa_hf.models.temporal_latent_bottleneck.configuration import TemporalLatentBottleneckConfig
from rsa_hf.models.temporal_latent_bottleneck.modeling import (
    State,
    TemporalLatentBottleneckModel,
    TemporalLatentBottleneckOutput,
    TemporalLatentBottleneckPreTrainedModel,
)

__all__ = ["TemporalLatentBottleneckForCausalLM"]


class TemporalLatentBottleneckForCausalLM(TemporalLatentBottleneckPreTrainedModel, StateGenerationMixin):
    """A Temporal Latent Bottleneck that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012  (as transformers declares it)

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__(config)
        self.model = TemporalLatentBottleneckModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **keywords: Any,
    ) -> TemporalLatentBottleneckOutput:
        """Logits of the next token, and the loss.

        Args:
            input_ids: as of `TemporalLatentBottleneckModel.forward`, like what is not named here.
            attention_mask: likewise.
            state: likewise.
            inputs_embeds: likewise.
            labels: shape [B, T], the tokens themselves (they are shifted here); −100 is not counted.
            logits_to_keep: number of last positions to compute logits of, or which; 0: all.
            use_cache: as of `TemporalLatentBottleneckModel.forward`.
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
        return TemporalLatentBottleneckOutput(
            loss=loss, logits=logits, state=outputs.state, hidden_states=outputs.hidden_states
        )
