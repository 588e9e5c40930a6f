"""Values in messages: short, however large, deep or endless they are."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

__all__ = ["brief", "shorten"]

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxlist, _repr.maxtuple, _repr.maxdict = 4, 40, 40, 20
_repr.maxlong, _repr.maxstring, _repr.maxother = 60, 200, 200


def brief(value: object) -> str:
    """The `repr` of a value, shortened: what comes from a file may be of any size, or contain itself."""
    try:
        return _repr.repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return f"a {type(value).__name__} of more digits than can be shown"


def shorten(names: Sequence[str]) -> str:
    """The first few of many names, each cut where it is very long."""
    shown = ", ".join(name if len(name) <= 200 else f"{name[:200]}…" for name in names[:6])
    return shown if len(names) <= 6 else f"{shown}, … ({len(names)} in all)"
