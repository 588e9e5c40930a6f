"""Paths as users write them."""

from __future__ import annotations

import os

__all__ = ["expanded"]


def expanded(path: str) -> str:
    """Expand `~` and `$VARIABLES` in a path; a variable that is not set stays as it is."""
    return os.path.expanduser(os.path.expandvars(path))
