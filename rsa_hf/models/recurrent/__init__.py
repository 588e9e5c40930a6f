"""RNN, LSTM, GRU and linear RNN as transformers models: token-level recurrence. Importing registers Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from rsa_hf.models import register_causal
from rsa_hf.models.recurrent.configuration import RecurrentConfig
from rsa_hf.models.recurrent.modeling import (
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentModel,
)

__all__ = ["RecurrentConfig", "RecurrentForCausalLM", "RecurrentForSequenceClassification", "RecurrentModel"]

AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig)
AutoModel.register(RecurrentConfig, RecurrentModel)
register_causal(RecurrentConfig, RecurrentForCausalLM)
AutoModelForSequenceClassification.register(RecurrentConfig, RecurrentForSequenceClassification)
