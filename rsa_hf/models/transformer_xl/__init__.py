"""Transformer-XL (Dai et al., 2019), which transformers 5 no longer has."""

from rsa_hf.models.transformer_xl.configuration_transformer_xl import TransformerXLConfig
from rsa_hf.models.transformer_xl.modeling_transformer_xl import (
    TransformerXLForCausalLM,
    TransformerXLForSequenceClassification,
    TransformerXLModel,
)

__all__ = [
    "TransformerXLConfig",
    "TransformerXLForCausalLM",
    "TransformerXLForSequenceClassification",
    "TransformerXLModel",
]
