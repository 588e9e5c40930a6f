"""Which transformers fits: the one question that is asked before anything of it is imported."""

from __future__ import annotations

import transformers
from packaging.version import Version

__all__ = ["TRANSFORMERS_RANGE", "require_transformers", "what_fits"]

TRANSFORMERS_RANGE = ("5.17", "6")  # tested at both ends; the upper end is excluded


def what_fits() -> str:
    """The supported range and the installed version, as a sentence for messages."""
    low, high = TRANSFORMERS_RANGE
    return f"rsa_hf works with transformers ≥ {low}, < {high}; installed is {transformers.__version__}."


def require_transformers() -> str:
    """Check the installed transformers.

    Returns:
        Which versions fit, and which is installed, for a message.

    Raises:
        ImportError: it is outside the supported range.
    """
    low, high = TRANSFORMERS_RANGE
    if not Version(low) <= Version(transformers.__version__) < Version(high):
        raise ImportError(f"{what_fits()} Install one that fits: pip install 'transformers>={low},<{high}'")
    return what_fits()
