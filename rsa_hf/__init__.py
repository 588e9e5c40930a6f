"""rsa_hf: self-attention with recurrence (RSA, ICLR 2023) for pretrained Hugging Face Transformers.

Importing the package installs its hooks into transformers and PEFT (`rsa_hf.integration.hook_table` lists them), so
that patched checkpoints load through `AutoModel` and `pipeline`. Models without RSA heads are not affected.

Where the hooks do not fit the installed transformers, nothing is installed: importing the package warns, and each of
its public names raises the ImportError.
"""

import os as _os
import sys as _sys
import warnings as _warnings
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsa_hf.calibration import calibrate as calibrate
    from rsa_hf.config import HeadConfig as HeadConfig
    from rsa_hf.config import RSAConfig as RSAConfig
    from rsa_hf.layer import RSAHeads as RSAHeads
    from rsa_hf.ops import rem_product as rem_product
    from rsa_hf.patching import is_patched as is_patched
    from rsa_hf.patching import patch_model as patch_model
    from rsa_hf.patching import unpatch_model as unpatch_model
    from rsa_hf.rem import rem_matrix as rem_matrix
    from rsa_hf.report import rsa_report as rsa_report
    from rsa_hf.training.optimizer import param_groups as param_groups

__version__ = "0.2.0.dev0"

_MODULES = {
    "HeadConfig": "rsa_hf.config",
    "RSAConfig": "rsa_hf.config",
    "RSAHeads": "rsa_hf.layer",
    "calibrate": "rsa_hf.calibration",
    "is_patched": "rsa_hf.patching",
    "param_groups": "rsa_hf.training.optimizer",
    "patch_model": "rsa_hf.patching",
    "rem_matrix": "rsa_hf.rem",
    "rem_product": "rsa_hf.ops",
    "rsa_report": "rsa_hf.report",
    "unpatch_model": "rsa_hf.patching",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rsa_hf' has no attribute {name!r}")
    _import_module("rsa_hf.integration").install()
    value = getattr(_import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The hooks import transformers, which takes seconds. `rsa-hf --help` does without, and its commands install them;
# `python -m rsa_hf.run` starts another Python that does.
if (
    _os.path.basename(_sys.argv[0] if _sys.argv else "") not in ("rsa-hf", "rsa-hf.exe")
    and "rsa_hf.run" not in _sys.orig_argv
):
    try:
        _import_module("rsa_hf.integration").install()
    except ImportError as _error:
        _warnings.warn(f"rsa_hf cannot be used: {_error}", stacklevel=2)
