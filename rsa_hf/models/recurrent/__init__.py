"""RNN, LSTM, GRU and linear RNN: token-level recurrence."""

from rsa_hf.models.recurrent.configuration_recurrent import RecurrentConfig
from rsa_hf.models.recurrent.modeling_recurrent import (
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentModel,
)

__all__ = ["RecurrentConfig", "RecurrentForCausalLM", "RecurrentForSequenceClassification", "RecurrentModel"]
