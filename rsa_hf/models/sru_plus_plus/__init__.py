"""SRU++ (Lei, 2021): fast recurrence with a little attention."""

from rsa_hf.models.sru_plus_plus.configuration_sru_plus_plus import *
from rsa_hf.models.sru_plus_plus.modeling_sru_plus_plus import *
