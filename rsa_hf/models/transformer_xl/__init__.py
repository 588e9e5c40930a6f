"""Transformer-XL (Dai et al., 2019), which transformers 5 no longer has."""

from rsa_hf.models.transformer_xl.configuration_transformer_xl import *
from rsa_hf.models.transformer_xl.modeling_transformer_xl import *
