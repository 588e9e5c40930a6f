"""SRU++ as a language model: loss, logits, generation with a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.generation import StateGenerationMixin
from rsa_hf.models.sru_plus_plus.configuration import SRUPlusPlusConfig
from rsa_hf.models.sru_plus_plus.modeling import SRUPlusPlusHeadOutput, SRUPlusPlusModel, SRUPlusPlusPreTrainedModel

__all__ = ["SRUPlusPlusForCausalLM"]


class SRUPlusPlusForCausalLM(SRUPlusPlusPreTrainedModel, StateGenerationMixin):
    """SRU++ with a softmax over the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012  (as transformers declares it)

    def __init__(self, config: SRUPlusPlusConfig) -> None:
        super().__init__(config)
        self.model = SRUPlusPlusModel(config)
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
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **keywords: Any,
    ) -> SRUPlusPlusHeadOutput:
        """Logits of the next token, and the loss.

        Args:
            input_ids: as of `SRUPlusPlusModel.forward`, like what is not named here.
            attention_mask: likewise.
            state: likewise.
            inputs_embeds: likewise.
            labels: shape [B, T], the tokens themselves (they are shifted here); −100 is not counted.
            use_cache: as of `SRUPlusPlusModel.forward`.
            logits_to_keep: number of last positions to compute logits of, or which; 0: all.
            num_items_in_batch: what to divide the summed loss by, where a batch is one part of a larger one; None:
                the labels counted.
            **keywords: `output_hidden_states`, `output_attentions`.
        """
        outputs = self.model(input_ids, attention_mask, state, inputs_embeds, use_cache, **keywords)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        return SRUPlusPlusHeadOutput(
            loss=loss,
            logits=logits,
            state=outputs.state,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
