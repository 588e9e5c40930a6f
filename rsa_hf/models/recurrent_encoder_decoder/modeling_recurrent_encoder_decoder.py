"""Encoder-decoder RNNs (Sutskever et al., 2014, Sequence to Sequence Learning with Neural Networks; Cho et al., 2014).

The encoder's last state is the context c, the only link from source to decoder: s_0 = c, s_t = f(s_{t−1}, y_{t−1}),
and the token y_t is drawn from softmax(W s_t). In training y_{t−1} is the true token (teacher forcing).

Notation: B rows, S tokens of the source, T of the target, n channels, L layers, k parts of a state: 2 for an LSTM
(h, c), else 1.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput, can_return_tuple

from rsa_hf.models.recurrent.modeling_recurrent import RecurrentModel, RecurrentPreTrainedModel
from rsa_hf.models.recurrent_encoder_decoder.configuration_recurrent_encoder_decoder import (
    RecurrentEncoderDecoderConfig,
)
from rsa_hf.models.segments import SegmentForCausalLM, SegmentOutput
from rsa_hf.utils.versions import CACHE

__all__ = ["RecurrentEncoderDecoderForConditionalGeneration", "RecurrentEncoderDecoderModel"]


@dataclass
class RecurrentEncoderOutput(ModelOutput):
    """Output of the encoder."""

    last_hidden_state: Tensor | None = None  # [B, S, n], or [B, S, 2n] if bidirectional; undefined at padding
    context: Tensor | None = None  # the decoder's first state, [B, L, k, n]
    hidden_states: tuple[Tensor, ...] | None = None  # the embeddings and each layer's output


@dataclass
class RecurrentEncoderDecoderOutput(SegmentOutput):
    """Output of the decoder, with the state of each of its layers, [B, k, 1, n]; and of the encoder, if it has run."""

    decoder_hidden_states: tuple[Tensor, ...] | None = None
    context: Tensor | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None


class RecurrentEncoderDecoderPreTrainedModel(RecurrentPreTrainedModel):
    """Base of encoder, decoder and both."""

    config_class = RecurrentEncoderDecoderConfig  # type: ignore[assignment]
    config: RecurrentEncoderDecoderConfig


class RecurrentEncoder(RecurrentEncoderDecoderPreTrainedModel):
    """The encoder: a recurrent network and, if it is bidirectional, a map of its last states to the context."""

    base_model_prefix = "network"  # the module with the embedding table

    def __init__(self, config: RecurrentEncoderDecoderConfig) -> None:
        super().__init__(config)
        n = config.hidden_size
        self.network = RecurrentModel(config)
        self.parts = 2 if config.cell == "lstm" else 1
        maps = config.num_hidden_layers * self.parts if config.bidirectional else 0
        self.projections = nn.ModuleList(nn.Linear(2 * n, n) for _ in range(maps))
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> RecurrentEncoderOutput:
        """As `RecurrentModel.forward`; without `attention_mask`, `pad_token_id` is padding wherever it occurs."""
        if attention_mask is None and input_ids is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        outputs = self.network(
            input_ids, attention_mask, None, inputs_embeds, True, output_hidden_states, detach_state=False
        )
        context = torch.stack(outputs.state, dim=1).squeeze(3)
        if self.config.bidirectional:
            both = context.unflatten(2, (self.parts, 2)).flatten(3).flatten(1, 2).unbind(1)
            context = torch.stack([project(ends) for project, ends in zip(self.projections, both, strict=True)], dim=1)
            context = context.unflatten(1, (-1, self.parts))
        return RecurrentEncoderOutput(outputs.last_hidden_state, context, outputs.hidden_states)


class RecurrentEncoderDecoderModel(RecurrentEncoderDecoderPreTrainedModel):
    """Encoder and decoder, without a head."""

    _tied_weights_keys = {"decoder.embeddings.weight": "encoder.network.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: RecurrentEncoderDecoderConfig) -> None:
        super().__init__(config)
        self.encoder = RecurrentEncoder(config)
        decoder_config = copy.deepcopy(config)
        decoder_config.bidirectional = False
        self.decoder = RecurrentModel(decoder_config)
        self.decoder.set_input_embeddings(self.encoder.get_input_embeddings())
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table that encoder and decoder share."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table of encoder and decoder."""
        self.encoder.set_input_embeddings(value)
        self.decoder.set_input_embeddings(value)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Encoder and decoder always share their table; `tie_word_embeddings` is only about the softmax."""
        return dict(self._tied_weights_keys)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: RecurrentEncoderOutput | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> RecurrentEncoderDecoderOutput:
        """Hidden states of the decoder.

        * `input_ids`, sources, [B, S], with `attention_mask`; or `inputs_embeds`, [B, S, n].
        * `decoder_input_ids`, the tokens that the decoder reads, `decoder_start_token_id` first, [B, T], with
          `decoder_attention_mask`; or `decoder_inputs_embeds`, [B, T, n]. Padding after the targets needs no mask,
          since nothing follows it.
        * `encoder_outputs`, instead of the sources; or `state`, as the call on the previous target tokens returned it.
        """
        encoded = RecurrentEncoderOutput()
        if state is None:
            if encoder_outputs is None:
                encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, output_hidden_states)
            encoded = encoder_outputs
            assert encoded.context is not None
            state = encoded.context.unsqueeze(3).unbind(1)
        outputs = self.decoder(
            decoder_input_ids, decoder_attention_mask, state, decoder_inputs_embeds, use_cache, output_hidden_states
        )
        return RecurrentEncoderDecoderOutput(
            last_hidden_state=outputs.last_hidden_state,
            state=outputs.state,
            decoder_hidden_states=outputs.hidden_states,
            context=encoded.context,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
        )


class RecurrentEncoderDecoderForConditionalGeneration(RecurrentEncoderDecoderPreTrainedModel, SegmentForCausalLM):
    """An encoder-decoder RNN that predicts the next token of the target."""

    _tied_weights_keys = {"lm_head.weight": "model.encoder.network.embeddings.weight"}  # noqa: RUF012

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> RecurrentEncoderDecoderOutput:
        """Logits of the target's tokens, and the loss.

        Takes the arguments of the base model, and `labels`, the targets, [B, T]: logits t are those of label t, −100
        is ignored. Without `decoder_input_ids` the decoder reads the labels after `decoder_start_token_id`.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        kwargs |= {"decoder_inputs_embeds": decoder_inputs_embeds, "return_dict": True}
        outputs: Any = self.model(input_ids, attention_mask, decoder_input_ids, **kwargs)
        logits, loss = self.predict(outputs.last_hidden_state, slice(None), None, shift_labels=labels, **kwargs)
        return replace(outputs, last_hidden_state=None, loss=loss, logits=logits)  # type: ignore[no-any-return]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's input for labels [B, T]: the labels shifted right by one (teacher forcing)."""
        before = nn.functional.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id)
        return before.masked_fill(before == -100, self.config.pad_token_id)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        encoder_outputs: RecurrentEncoderOutput | None = None,
        state: Sequence[Tensor] | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,  # `generate` then accepts all arguments of `forward`, such as the labels of Seq2SeqTrainer
    ) -> dict[str, Any]:
        """The decoder's next segment: all tokens after the context, or the last one after a state."""
        names = ("decoder_attention_mask", "use_cache", "output_hidden_states")
        inputs = {name: kwargs[name] for name in names if name in kwargs}
        state = kwargs.get(CACHE) or state
        behind_state = state is not None and not is_first_iteration
        inputs |= {"encoder_outputs": encoder_outputs, "state": state}
        return {**inputs, "decoder_input_ids": input_ids[:, -1:] if behind_state else input_ids}
