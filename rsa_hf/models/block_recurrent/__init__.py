"""The Block-Recurrent Transformer (Hutchins et al., 2022)."""

from rsa_hf.models.block_recurrent.configuration_block_recurrent import *
from rsa_hf.models.block_recurrent.modeling_block_recurrent import *
