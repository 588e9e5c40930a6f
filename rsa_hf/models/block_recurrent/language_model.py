"""The Block-Recurrent Transformer as a language model: loss, logits, generation with memory."""

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
from rsa_hf.models.generation import MemoryGenerationMixin

__all__ = ["BlockRecurrentForCausalLM"]


class BlockRecurrentForCausalLM(BlockRecurrentPreTrainedModel, MemoryGenerationMixin):
    """The Block-Recurrent Transformer with a softmax over the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (as transformers declares it)

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__(config)
        self.model = BlockRecurrentModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
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
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **keywords: Any,
    ) -> BlockRecurrentOutput:
        """Logits of the next token, and the loss.

        Args:
            input_ids: as of `BlockRecurrentModel.forward`, like what is not named here.
            attention_mask: likewise.
            mems: likewise.
            inputs_embeds: likewise.
            labels: shape [B, T], the tokens themselves (they are shifted here); −100 is not counted.
            use_cache: as of `BlockRecurrentModel.forward`.
            logits_to_keep: number of last positions to compute logits of, or which; 0: all.
            output_hidden_states: return the embeddings and each layer's output.
            **keywords: for the loss, e.g. `num_items_in_batch`.
        """
        outputs = self.model(
            input_ids, attention_mask, mems, inputs_embeds, use_cache, output_hidden_states=output_hidden_states
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **keywords)
        return BlockRecurrentOutput(loss=loss, logits=logits, mems=outputs.mems, hidden_states=outputs.hidden_states)
