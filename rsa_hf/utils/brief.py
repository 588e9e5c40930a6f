"""Short forms of values for error messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

__all__ = ["brief", "shorten"]

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxlist, _repr.maxtuple, _repr.maxdict = 4, 40, 40, 20
_repr.maxlong, _repr.maxstring, _repr.maxother = 60, 200, 200


def brief(value: object) -> str:
    """The `repr` of a value, cut to a bounded length: a value read from a file may be huge or contain itself."""
    try:
        return _repr.repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"a {type(value).__name__} of more digits than can be shown"


def shorten(names: Sequence[str]) -> str:
    """The first six names, each cut to 200 characters, and how many there are."""
    shown = ", ".join(name if len(name) <= 200 else f"{name[:200]}…" for name in names[:6])
    return shown if len(names) <= 6 else f"{shown}, … ({len(names)} in all)"
