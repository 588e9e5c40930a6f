"""SRU++ (Lei, 2021): fast recurrence with a little attention. Importing it registers the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from rsa_hf.models import register_causal
from rsa_hf.models.sru_plus_plus.classifier import SRUPlusPlusForSequenceClassification
from rsa_hf.models.sru_plus_plus.configuration import SRUPlusPlusConfig
from rsa_hf.models.sru_plus_plus.language_model import SRUPlusPlusForCausalLM
from rsa_hf.models.sru_plus_plus.modeling import SRUPlusPlusModel

__all__ = [
    "SRUPlusPlusConfig",
    "SRUPlusPlusForCausalLM",
    "SRUPlusPlusForSequenceClassification",
    "SRUPlusPlusModel",
]

AutoConfig.register(SRUPlusPlusConfig.model_type, SRUPlusPlusConfig)
AutoModel.register(SRUPlusPlusConfig, SRUPlusPlusModel)
register_causal(SRUPlusPlusConfig, SRUPlusPlusForCausalLM)
AutoModelForSequenceClassification.register(SRUPlusPlusConfig, SRUPlusPlusForSequenceClassification)
