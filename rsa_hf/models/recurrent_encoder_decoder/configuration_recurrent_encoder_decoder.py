"""The configuration of encoder-decoder RNNs."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from rsa_hf.models.recurrent.configuration_recurrent import RecurrentConfig

__all__ = ["RecurrentEncoderDecoderConfig"]


@strict
class RecurrentEncoderDecoderConfig(PreTrainedConfig):
    """Two stacks of recurrent layers over one vocabulary: the second starts from the last state of the first.

    Args:
        vocab_size: number of tokens of sources and targets; encoder and decoder share their embeddings.
        cell: `"rnn"`, `"lstm"`, `"gru"` or `"linear"`, as in `RecurrentConfig`.
        hidden_size: n, width of the embeddings and of each layer's state, in each direction.
        num_hidden_layers: number of layers of the encoder, and of the decoder.
        bidirectional: whether the encoder also reads from the end to the beginning. A linear map of 2n to n for each
            layer and part of the state then takes both last states to the decoder's first.
        dropout: dropout rate of the embeddings and of each layer's output.
        initializer_range: standard deviation of initial embeddings; recurrent layers start as in `torch.nn`.
        tie_word_embeddings: whether the softmax uses the embedding table.
        use_cache: whether to return the decoder's state.
        pad_token_id: id of the padding token.
        decoder_start_token_id: id of the token that the decoder reads first; None: `pad_token_id`, whose embedding is
            0.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    model_type = "recurrent_encoder_decoder"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["state", "context", "encoder_last_hidden_state"]

    vocab_size: int = 50257
    cell: str = "lstm"
    hidden_size: int = 512
    num_hidden_layers: int = 2
    bidirectional: bool = False
    dropout: float | int = 0.1
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int = 0
    decoder_start_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self.of_stack(bidirectional=False)  # raises for values that it does not allow

    def of_stack(self, bidirectional: bool) -> RecurrentConfig:
        """The config of the encoder's recurrent network, or of the decoder's."""
        shared = ("vocab_size", "cell", "hidden_size", "num_hidden_layers", "dropout", "initializer_range",
                  "use_cache", "pad_token_id")  # fmt: skip
        return RecurrentConfig(bidirectional=bidirectional, **{name: getattr(self, name) for name in shared})
