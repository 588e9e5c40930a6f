"""Temporal Latent Bottleneck (Didolkar et al., 2022)."""

from rsa_hf.models.temporal_latent_bottleneck.configuration_temporal_latent_bottleneck import (
    TemporalLatentBottleneckConfig,
)
from rsa_hf.models.temporal_latent_bottleneck.modeling_temporal_latent_bottleneck import (
    TemporalLatentBottleneckForCausalLM,
    TemporalLatentBottleneckForSequenceClassification,
    TemporalLatentBottleneckModel,
)

__all__ = [
    "TemporalLatentBottleneckConfig",
    "TemporalLatentBottleneckForCausalLM",
    "TemporalLatentBottleneckForSequenceClassification",
    "TemporalLatentBottleneckModel",
]
