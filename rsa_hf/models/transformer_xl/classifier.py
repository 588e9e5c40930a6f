"""Transformer-XL as a classifier of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.last_token import at_last_token, mask_until_last_token
from rsa_hf.models.transformer_xl.configuration import TransformerXLConfig
from rsa_hf.models.transformer_xl.modeling import (
    TransformerXLHeadOutput,
    TransformerXLModel,
    TransformerXLPreTrainedModel,
)

__all__ = ["TransformerXLForSequenceClassification"]


class TransformerXLForSequenceClassification(TransformerXLPreTrainedModel):
    """Transformer-XL with a linear classifier on the last token that is not padding."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = TransformerXLModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels or 0, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
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
        tokens = mask_until_last_token(attention_mask, input_ids, self.config.pad_token_id)
        logits = self.score(at_last_token(outputs.last_hidden_state, tokens))
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
