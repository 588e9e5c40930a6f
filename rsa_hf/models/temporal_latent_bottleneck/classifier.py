"""Temporal Latent Bottleneck as a classifier of sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.last_token import at_last_token, mask_until_last_token
from rsa_hf.models.temporal_latent_bottleneck.configuration import TemporalLatentBottleneckConfig
from rsa_hf.models.temporal_latent_bottleneck.modeling import (
    State,
    TemporalLatentBottleneckModel,
    TemporalLatentBottleneckOutput,
    TemporalLatentBottleneckPreTrainedModel,
)

__all__ = ["TemporalLatentBottleneckForSequenceClassification"]


class TemporalLatentBottleneckForSequenceClassification(TemporalLatentBottleneckPreTrainedModel):
    """A Temporal Latent Bottleneck with a linear classifier on the last real token.

    That token has seen its chunk and, through the states, those before. (Ours: in the Long Range Arena the mean of the
    states is classified, which have seen whole chunks only.)
    """

    def __init__(self, config: TemporalLatentBottleneckConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TemporalLatentBottleneckModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels or 0, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> TemporalLatentBottleneckOutput:
        """Scores of the classes, [B, num_labels], and the loss.

        Args:
            input_ids: as of `TemporalLatentBottleneckModel.forward`, like what is not named here.
            attention_mask: likewise; without it every token is real, but for `pad_token_id` at the end.
            state: likewise.
            inputs_embeds: likewise.
            labels: shape [B], or [B, num_labels], as `problem_type` needs.
            use_cache: as of `TemporalLatentBottleneckModel.forward`.
            output_hidden_states: likewise.
        """
        attention_mask = mask_until_last_token(attention_mask, input_ids, self.config.pad_token_id)
        outputs = self.model(
            input_ids, attention_mask, state, inputs_embeds, use_cache, output_hidden_states=output_hidden_states
        )
        logits = self.score(at_last_token(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return TemporalLatentBottleneckOutput(
            loss=loss, logits=logits, state=outputs.state, hidden_states=outputs.hidden_states
        )
