"""Temporal Latent Bottleneck (Didolkar et al., 2022) as a transformers model. Importing registers Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from rsa_hf.models import register_causal
from rsa_hf.models.temporal_latent_bottleneck.classifier import TemporalLatentBottleneckForSequenceClassification
from rsa_hf.models.temporal_latent_bottleneck.configuration import TemporalLatentBottleneckConfig
from rsa_hf.models.temporal_latent_bottleneck.language_model import TemporalLatentBottleneckForCausalLM
from rsa_hf.models.temporal_latent_bottleneck.modeling import TemporalLatentBottleneckModel

__all__ = [
    "TemporalLatentBottleneckConfig",
    "TemporalLatentBottleneckForCausalLM",
    "TemporalLatentBottleneckForSequenceClassification",
    "TemporalLatentBottleneckModel",
]

AutoConfig.register(TemporalLatentBottleneckConfig.model_type, TemporalLatentBottleneckConfig)
AutoModel.register(TemporalLatentBottleneckConfig, TemporalLatentBottleneckModel)
register_causal(TemporalLatentBottleneckConfig, TemporalLatentBottleneckForCausalLM)
AutoModelForSequenceClassification.register(
    TemporalLatentBottleneckConfig, TemporalLatentBottleneckForSequenceClassification
)
