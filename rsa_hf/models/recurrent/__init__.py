"""RNN, LSTM, GRU and linear RNN: token-level recurrence."""

from rsa_hf.models.recurrent.configuration_recurrent import *
from rsa_hf.models.recurrent.modeling_recurrent import *
