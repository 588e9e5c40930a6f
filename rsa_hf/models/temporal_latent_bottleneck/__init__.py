"""Temporal Latent Bottleneck (Didolkar et al., 2022)."""

from rsa_hf.models.temporal_latent_bottleneck.configuration_temporal_latent_bottleneck import *
from rsa_hf.models.temporal_latent_bottleneck.modeling_temporal_latent_bottleneck import *
