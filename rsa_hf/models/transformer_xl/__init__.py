"""Transformer-XL (Dai et al., 2019), which transformers 5 no longer has. Importing it registers the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from rsa_hf.models import register_causal
from rsa_hf.models.transformer_xl.classifier import TransformerXLForSequenceClassification
from rsa_hf.models.transformer_xl.configuration import TransformerXLConfig
from rsa_hf.models.transformer_xl.language_model import TransformerXLForCausalLM
from rsa_hf.models.transformer_xl.modeling import TransformerXLModel

__all__ = [
    "TransformerXLConfig",
    "TransformerXLForCausalLM",
    "TransformerXLForSequenceClassification",
    "TransformerXLModel",
]

AutoConfig.register(TransformerXLConfig.model_type, TransformerXLConfig)
AutoModel.register(TransformerXLConfig, TransformerXLModel)
register_causal(TransformerXLConfig, TransformerXLForCausalLM)
AutoModelForSequenceClassification.register(TransformerXLConfig, TransformerXLForSequenceClassification)
