"""The Block-Recurrent Transformer (Hutchins et al., 2022)."""

from rsa_hf.models.block_recurrent.configuration_block_recurrent import BlockRecurrentConfig
from rsa_hf.models.block_recurrent.modeling_block_recurrent import (
    BlockRecurrentForCausalLM,
    BlockRecurrentForSequenceClassification,
    BlockRecurrentModel,
)

__all__ = [
    "BlockRecurrentConfig",
    "BlockRecurrentForCausalLM",
    "BlockRecurrentForSequenceClassification",
    "BlockRecurrentModel",
]
