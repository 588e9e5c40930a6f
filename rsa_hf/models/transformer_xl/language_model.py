"""Transformer-XL as a language model: loss, log-probabilities, generation with memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from rsa_hf.models.generation import MemoryGenerationMixin
from rsa_hf.models.transformer_xl.adaptive import AdaptiveLogSoftmax, tied_parameters
from rsa_hf.models.transformer_xl.configuration import TransformerXLConfig
from rsa_hf.models.transformer_xl.modeling import (
    TransformerXLHeadOutput,
    TransformerXLModel,
    TransformerXLPreTrainedModel,
)

__all__ = ["TransformerXLForCausalLM"]


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, MemoryGenerationMixin):
    """Transformer-XL with an adaptive (or, without cutoffs, plain) softmax over the next token."""

    # It computes the loss of `shift_labels` itself. They are among the keywords of `forward`: the Trainer takes every
    # argument of it with "label" in its name for one that has to be there.
    takes_shift_labels: ClassVar[bool] = True

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.transformer = TransformerXLModel(config)
        self.crit = AdaptiveLogSoftmax(config)
        self._tied_weights_keys = {
            f"crit.{target}": f"transformer.word_emb.{source}" for target, source in tied_parameters(config).items()
        }
        self.post_init()  # type: ignore[no-untyped-call]

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Projections are tied by a setting of their own, so this does not depend on `tie_word_embeddings` alone."""
        return dict(self._tied_weights_keys)

    def get_output_embeddings(self) -> nn.Module | None:
        """The softmax's layer, where there is one."""
        return self.crit.out_layers[0] if len(self.crit.out_layers) == 1 else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace what `get_output_embeddings` gives."""
        self.crit.out_layers[0] = new_embeddings

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
        num_items_in_batch: int | Tensor | None = None,
        **keywords: Any,
    ) -> TransformerXLHeadOutput:
        """Log-probabilities of the next token, and the loss.

        Args:
            input_ids: as of `TransformerXLModel.forward`, like what is not named here.
            attention_mask: likewise.
            mems: likewise.
            inputs_embeds: likewise.
            labels: shape [B, T], the tokens themselves (they are shifted here); −100 is not counted.
            use_cache: as of `TransformerXLModel.forward`.
            logits_to_keep: number of last positions to compute logits of, or which; 0: all.
            num_items_in_batch: what to divide the summed loss by, where a batch is one part of a larger one; None:
                the labels counted.
            **keywords: `output_hidden_states`, `output_attentions`; and `shift_labels`, shape [B, T], the token that
                follows each position, instead of `labels`: of a segment whose last token is followed by the next
                segment's first.

        Returns:
            With labels, a model in training mode with an adaptive softmax gives no logits: not to compute those of
            every word is what it is for.
        """
        shift_labels = keywords.pop("shift_labels", None)
        outputs = self.transformer(input_ids, attention_mask, mems, inputs_embeds, use_cache, **keywords)
        hidden = outputs.last_hidden_state
        loss = None
        if shift_labels is not None:
            loss = self._loss(hidden, shift_labels, num_items_in_batch)
        elif labels is not None:
            loss = self._loss(hidden[:, :-1], labels[:, 1:], num_items_in_batch)
        logits = None
        if loss is None or not self.training or not self.config.cutoffs:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.crit(hidden[:, kept])
        return TransformerXLHeadOutput(
            loss=loss,
            logits=logits,
            mems=outputs.mems,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, hidden: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        counted = labels != -100
        total = self.crit.negative_log_likelihood(hidden[counted], labels[counted]).sum()
        if num_items_in_batch is not None:
            return total / torch.as_tensor(num_items_in_batch, device=total.device)
        return total / counted.sum().clamp(min=1)
