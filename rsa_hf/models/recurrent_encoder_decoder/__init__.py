"""Encoder-decoder RNNs as transformers models. Importing registers Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from rsa_hf.models.recurrent_encoder_decoder.configuration import RecurrentEncoderDecoderConfig
from rsa_hf.models.recurrent_encoder_decoder.modeling import (
    RecurrentEncoderDecoderForConditionalGeneration,
    RecurrentEncoderDecoderModel,
)

__all__ = [
    "RecurrentEncoderDecoderConfig",
    "RecurrentEncoderDecoderForConditionalGeneration",
    "RecurrentEncoderDecoderModel",
]

AutoConfig.register(RecurrentEncoderDecoderConfig.model_type, RecurrentEncoderDecoderConfig)
AutoModel.register(RecurrentEncoderDecoderConfig, RecurrentEncoderDecoderModel)
AutoModelForSeq2SeqLM.register(RecurrentEncoderDecoderConfig, RecurrentEncoderDecoderForConditionalGeneration)
