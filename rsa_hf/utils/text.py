"""Text for messages, tables, pages and JSON: short forms of values, columns, and no NaN."""

import difflib
import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxlist, _repr.maxtuple, _repr.maxdict = 4, 40, 40, 20
_repr.maxlong, _repr.maxstring, _repr.maxother = 60, 200, 200


def brief(value: object) -> str:
    """The `repr` of a value, cut to a bounded length: a value read from a file may be huge or contain itself."""
    return _repr.repr(list(value) if isinstance(value, tuple) else value)


def shorten(names: Sequence[str]) -> str:
    """The first six names, each cut to 200 characters, and how many there are."""
    shown = ", ".join(name if len(name) <= 200 else f"{name[:200]}…" for name in names[:6])
    return shown if len(names) <= 6 else f"{shown}, … ({len(names)} in all)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the known name that is most similar to an unknown one; empty if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows of cells in columns. The first row is the header; a rule follows it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def percent(share: float) -> str:
    """A share for a table, such as `12.50%`; a dash where it is not defined."""
    return "–" if math.isnan(share) else f"{share:.2%}"


def finite_or_null(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, with None in a value or in nested mappings and lists."""
    if isinstance(value, dict):
        return {key: finite_or_null(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
