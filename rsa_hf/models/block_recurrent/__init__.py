"""The Block-Recurrent Transformer (Hutchins et al., 2022). Importing it registers the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from rsa_hf.models import register_causal
from rsa_hf.models.block_recurrent.classifier import BlockRecurrentForSequenceClassification
from rsa_hf.models.block_recurrent.configuration import BlockRecurrentConfig
from rsa_hf.models.block_recurrent.language_model import BlockRecurrentForCausalLM
from rsa_hf.models.block_recurrent.modeling import BlockRecurrentModel

__all__ = [
    "BlockRecurrentConfig",
    "BlockRecurrentForCausalLM",
    "BlockRecurrentForSequenceClassification",
    "BlockRecurrentModel",
]

AutoConfig.register(BlockRecurrentConfig.model_type, BlockRecurrentConfig)
AutoModel.register(BlockRecurrentConfig, BlockRecurrentModel)
register_causal(BlockRecurrentConfig, BlockRecurrentForCausalLM)
AutoModelForSequenceClassification.register(BlockRecurrentConfig, BlockRecurrentForSequenceClassification)
