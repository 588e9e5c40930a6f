"""Transformer-XL as a classifier of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.transformer_xl.configuration import TransformerXLConfig
from rsa_hf.models.transformer_xl.modeling import (
    TransformerXLHeadOutput,
    TransformerXLModel,
    TransformerXLPreTrainedModel,
)

__all__ = ["TransformerXLForSequenceClassification", "last_token"]


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
        hidden = outputs.last_hidden_state
        last = last_token(hidden, input_ids, attention_mask, self.config.pad_token_id)
        logits = self.score(hidden[torch.arange(len(hidden)), last])
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


def last_token(
    hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None, pad_token_id: int | None
) -> Tensor:
    """The place in the segment of each row's last token that is not padding: [B].

    Args:
        hidden: the segment, shape [B, T, …].
        input_ids: shape [B, T]; they tell where there is no mask, but a `pad_token_id`.
        attention_mask: shape [B, L], 0 for padding; its last T columns are the segment.
        pad_token_id: of padding.
    """
    T = hidden.shape[1]
    if attention_mask is not None:
        real = attention_mask[:, -T:].bool()
    elif input_ids is not None and pad_token_id is not None:
        real = input_ids != pad_token_id
    else:
        real = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    return (real * torch.arange(T, device=hidden.device)).argmax(dim=1)
