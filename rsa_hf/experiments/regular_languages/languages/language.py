"""What a formal language has to offer, and what follows from it: the targets of next-character prediction."""

from __future__ import annotations

from random import Random
from typing import Any, Protocol

__all__ = ["Language", "all_strings", "legal_next"]


class Language(Protocol):
    """A language as a deterministic machine that reads one character at a time.

    Attributes:
        alphabet: its characters.
        start: the state before the first character. States are hashable.
        complete: whether `sample` draws strings of the language, or prefixes of such.
    """

    @property
    def alphabet(self) -> str: ...  # noqa: D102

    @property
    def start(self) -> Any: ...  # noqa: D102

    @property
    def complete(self) -> bool: ...  # noqa: D102

    def step(self, state: Any, character: str) -> Any:
        """The state behind `character`; None where no string of the language goes on like this."""
        ...

    def accepts(self, state: Any) -> bool:
        """Whether what was read is a string of the language."""
        ...

    def count(self, length: int) -> int:
        """Number of different strings of `length` characters that `sample` may draw."""
        ...

    def sample(self, length: int, random: Random) -> str:
        """A random string of `length` characters; ValueError where there is none."""
        ...


def legal_next(language: Language, string: str) -> list[tuple[frozenset[str], bool]]:
    """The targets of next-character prediction (Bhattamishra et al., 2020, section 3).

    Args:
        language: the language.
        string: a string, or the beginning of one.

    Returns:
        For each of the len(string) + 1 prefixes, the empty one first: the characters that may come next, and whether
        the prefix is a string of the language, so that it may end here.

    Raises:
        ValueError: no string of the language begins like this.
    """
    state, targets = language.start, list[tuple[frozenset[str], bool]]()
    for character in (*string, None):
        after = {c: language.step(state, c) for c in language.alphabet}
        targets.append((frozenset(c for c in after if after[c] is not None), language.accepts(state)))
        if character is not None:
            state = after.get(character)
            if state is None:
                raise ValueError(f"{string!r}: no string of the language begins with {string[: len(targets)]!r}.")
    return targets


def all_strings(language: Language, length: int) -> list[str]:
    """Every string of `length` characters that `sample` may draw, in the alphabet's order.

    All prefixes are walked through: for languages with few of them.
    """
    prefixes = [("", language.start)]
    for _ in range(length):
        prefixes = [
            (string + c, after)
            for string, state in prefixes
            for c in language.alphabet
            if (after := language.step(state, c)) is not None
        ]
    return [string for string, state in prefixes if not language.complete or language.accepts(state)]
