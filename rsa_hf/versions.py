"""Which versions of transformers the package fits, and how that is said."""

from __future__ import annotations

import transformers

__all__ = ["TRANSFORMERS_RANGE", "what_fits"]

TRANSFORMERS_RANGE = ("5.17", "6")  # tested at both ends; the upper end is excluded


def what_fits() -> str:
    """The supported range and the installed version, as a sentence for messages."""
    low, high = TRANSFORMERS_RANGE
    return f"rsa_hf works with transformers ≥ {low}, < {high}; installed is {transformers.__version__}."
