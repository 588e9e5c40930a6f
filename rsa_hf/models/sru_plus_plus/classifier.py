"""SRU++ as a classifier of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.last_token import at_last_token, mask_until_last_token
from rsa_hf.models.sru_plus_plus.configuration import SRUPlusPlusConfig
from rsa_hf.models.sru_plus_plus.modeling import SRUPlusPlusHeadOutput, SRUPlusPlusModel, SRUPlusPlusPreTrainedModel

__all__ = ["SRUPlusPlusForSequenceClassification"]


class SRUPlusPlusForSequenceClassification(SRUPlusPlusPreTrainedModel):
    """SRU++ with a linear classifier on the last token that is not padding."""

    def __init__(self, config: SRUPlusPlusConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = SRUPlusPlusModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels or 0, bias=False)
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
        **keywords: Any,
    ) -> SRUPlusPlusHeadOutput:
        """Scores of the classes, [B, num_labels], and the loss.

        Args:
            input_ids: as of `SRUPlusPlusModel.forward`, like what is not named here.
            attention_mask: likewise; without it every token is real, but for `pad_token_id` at the end.
            state: likewise.
            inputs_embeds: likewise.
            labels: shape [B], or [B, num_labels], as `problem_type` needs.
            use_cache: as of `SRUPlusPlusModel.forward`.
            **keywords: `output_hidden_states`, `output_attentions`.
        """
        attention_mask = mask_until_last_token(attention_mask, input_ids, self.config.pad_token_id)
        outputs = self.model(input_ids, attention_mask, state, inputs_embeds, use_cache, **keywords)
        logits = self.score(at_last_token(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SRUPlusPlusHeadOutput(
            loss=loss,
            logits=logits,
            state=outputs.state,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
