"""Paths as people write them."""

from __future__ import annotations

import os

__all__ = ["expanded"]


def expanded(path: str) -> str:
    """A path with `~` and `$VARIABLES` replaced, which a shell does not do in files and after `=`."""
    return os.path.expanduser(os.path.expandvars(path))
