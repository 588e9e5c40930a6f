"""What `rsa-hf doctor` finds: one line of its report, and checks whose own failure is a finding too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["Finding", "guarded"]


class Finding(NamedTuple):
    """One line of the report."""

    verdict: str  # ok, note or FAIL
    subject: str
    words: str

    def __str__(self) -> str:
        return f"{self.verdict:5} {self.subject:20} {self.words}"


def guarded(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an exception that ends it, whatever it is, is the last of them."""
    try:
        yield from check()
    except Exception as error:  # whatever it is, it is what a doctor is asked for
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        yield Finding("FAIL", subject, f"{type(error).__name__}: {first}")
