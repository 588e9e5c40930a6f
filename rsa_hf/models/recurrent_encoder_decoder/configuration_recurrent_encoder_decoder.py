"""The configuration of encoder-decoder RNNs."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from rsa_hf.models.recurrent.configuration_recurrent import RecurrentConfig

__all__ = ["RecurrentEncoderDecoderConfig"]


@strict
class RecurrentEncoderDecoderConfig(RecurrentConfig):
    """Two stacks of recurrent layers over one vocabulary: the second starts from the last state of the first.

    Takes the fields of `RecurrentConfig`, for both stacks, except `dilations`. With `bidirectional`, the encoder also
    reads from the end; a linear map from 2n to n for each layer and part of the state then turns both last states into
    the decoder's first state.
    """

    model_type = "recurrent_encoder_decoder"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["state", "context", "encoder_last_hidden_state"]

    is_encoder_decoder: bool = True
    pad_token_id: int = 0
    decoder_start_token_id: int | None = None  # what the decoder reads first; None: `pad_token_id`, embedded as 0
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id
        self.dilations = None  # the context is one state per layer
        super().__post_init__(**kwargs)
