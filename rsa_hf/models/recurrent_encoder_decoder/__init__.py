"""Encoder-decoder RNNs (Sutskever et al., 2014; Cho et al., 2014)."""

from rsa_hf.models.recurrent_encoder_decoder.configuration_recurrent_encoder_decoder import *
from rsa_hf.models.recurrent_encoder_decoder.modeling_recurrent_encoder_decoder import *
