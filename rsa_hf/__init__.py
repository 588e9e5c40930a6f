"""rsa_hf: self-attention with recurrence (RSA, ICLR 2023) for any pretrained Hugging Face Transformer.

Importing the package also arms its transformers hooks, so that patched checkpoints load through `AutoModel` and
`pipeline`, and, once `peft` is imported, those that keep adapters from losing RSA heads. Models without RSA heads are
not affected.
"""

import os as _os
import sys as _sys

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

# The command `rsa-hf` imports this package before it has read a word. It has to start where transformers does not fit,
# to say so, and should not import torch to print its help; its commands arm the hooks when they need them.
if _os.path.basename(_sys.argv[0] if _sys.argv else "") not in ("rsa-hf", "rsa-hf.exe"):
    from rsa_hf.integration import arm as _arm

    _arm()

    from rsa_hf.config import RSAConfig
    from rsa_hf.heads import RSAHeads
    from rsa_hf.ops import rem_product
    from rsa_hf.patching import is_patched, patch_model, unpatch_model
    from rsa_hf.rem import rem_matrix
    from rsa_hf.report import rsa_report
    from rsa_hf.training.optimizer import param_groups
