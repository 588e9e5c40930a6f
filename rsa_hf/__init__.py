"""rsa_hf: self-attention with recurrence (RSA, ICLR 2023) for any pretrained Hugging Face Transformer.

Importing the package also arms its transformers hooks, so that patched checkpoints load through `AutoModel` and
`pipeline`, and, once `peft` is imported, those that keep adapters from losing RSA heads. Models without RSA heads are
not affected.
"""

from rsa_hf.hooks import install as _install
from rsa_hf.peft_hooks import arm as _arm

_install()
_arm()

from rsa_hf.config import RSAConfig  # noqa: E402
from rsa_hf.heads import RSAHeads  # noqa: E402
from rsa_hf.patching import is_patched, patch_model, unpatch_model  # noqa: E402
from rsa_hf.product import rem_product  # noqa: E402
from rsa_hf.rem import rem_matrix  # noqa: E402
from rsa_hf.report import rsa_report  # noqa: E402
from rsa_hf.training.param_groups import param_groups  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "RSAConfig",
    "RSAHeads",
    "is_patched",
    "param_groups",
    "patch_model",
    "rem_matrix",
    "rem_product",
    "rsa_report",
    "unpatch_model",
]
