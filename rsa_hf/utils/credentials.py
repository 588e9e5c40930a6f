"""Recognise tokens of the Hub and passwords in addresses, so that they are never shown, written or uploaded."""

from __future__ import annotations

import re

__all__ = ["holds_credentials", "without_credentials"]

# "hf_" followed by letters and digits; the part of an address before the @.
_CREDENTIALS = re.compile(r"\bhf_[A-Za-z0-9]{16,}|(?<=://)[\w.~%!$&*+;=:-]+@")


def holds_credentials(text: str) -> bool:
    """Whether there is a token or a password in a text."""
    return _CREDENTIALS.search(text) is not None


def without_credentials(text: str) -> str:
    """The text with `…` in place of every token and password."""
    return _CREDENTIALS.sub(lambda found: "…@" if found[0].endswith("@") else "hf_…", text)
