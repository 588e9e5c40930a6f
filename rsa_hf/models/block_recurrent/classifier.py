"""The Block-Recurrent Transformer as a classifier of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.block_recurrent.configuration import BlockRecurrentConfig
from rsa_hf.models.block_recurrent.modeling import (
    BlockRecurrentModel,
    BlockRecurrentOutput,
    BlockRecurrentPreTrainedModel,
)
from rsa_hf.models.last_token import at_last_token, mask_until_last_token

__all__ = ["BlockRecurrentForSequenceClassification"]


class BlockRecurrentForSequenceClassification(BlockRecurrentPreTrainedModel):
    """The Block-Recurrent Transformer with a linear classifier on the last token that is not padding."""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = BlockRecurrentModel(config)
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
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BlockRecurrentOutput:
        """Scores of the classes [B, num_labels], and the loss.

        Args:
            input_ids: as of `BlockRecurrentModel.forward`, like what is not named here.
            attention_mask: likewise; it tells the last token. Without it `pad_token_id` does.
            mems: likewise.
            inputs_embeds: likewise.
            labels: shape [B], or [B, num_labels], as `problem_type` needs.
            use_cache: as of `BlockRecurrentModel.forward`.
            output_hidden_states: return the embeddings and each layer's output.
        """
        outputs = self.model(
            input_ids, attention_mask, mems, inputs_embeds, use_cache, output_hidden_states=output_hidden_states
        )
        tokens = mask_until_last_token(attention_mask, input_ids, self.config.pad_token_id)
        logits = self.score(at_last_token(outputs.last_hidden_state, tokens))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return BlockRecurrentOutput(loss=loss, logits=logits, mems=outputs.mems, hidden_states=outputs.hidden_states)
