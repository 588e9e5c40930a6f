"""Strings to train on and strings to test on, in bins of length."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rsa_hf.experiments.regular_languages.languages.language import Language, all_strings

__all__ = ["BINS", "Splits", "make_splits"]

BINS = ((2, 50), (51, 100), (101, 150))


@dataclass(frozen=True)
class Splits:
    """The data of one language.

    Attributes:
        train: strings of the lengths of the first bin.
        test: of each bin, its strings; no two alike.
        held_out: whether no string of the first test bin is trained on.
    """

    train: tuple[str, ...]
    test: tuple[tuple[str, ...], ...]
    held_out: bool


def make_splits(
    language: Language,
    train_size: int,
    test_size: int,
    seed: int,
    bins: tuple[tuple[int, int], ...] = BINS,
) -> Splits:
    """Draw the strings of a language: a length, all that occur being equally likely, then a string of it.

    Training strings may come twice. A bin that has no more strings than are asked for is taken whole. Where that is
    the first bin, as of (aa)*, Tomita-1 and Tomita-2, which have at most one string a length, it is both trained on
    and tested on: each string is a prefix of the next, so that nothing could be held out; the later bins are the test.

    Args:
        language: the language.
        train_size: number of strings to train on.
        test_size: number of strings to test on in each bin.
        seed: of all that is drawn.
        bins: first and last length of each bin; strings to train on are of the first.

    Raises:
        ValueError: the language has no string of a bin.
    """
    random = Random(seed)
    test, train, held_out = list[tuple[str, ...]](), tuple[str, ...](), True
    for number, (low, high) in enumerate(bins):
        lengths = [length for length in range(low, high + 1) if language.count(length)]
        if not lengths:
            raise ValueError(f"bins={bins}: the language has no string of {low} to {high} characters.")
        wanted = test_size + (train_size if number == 0 else 0)
        small = sum(language.count(length) for length in lengths) <= wanted
        whole = tuple(string for length in lengths for string in all_strings(language, length)) if small else ()
        if number == 0:
            held_out = not small
            train = whole or tuple(language.sample(random.choice(lengths), random) for _ in range(train_size))
        test.append(whole or _unseen(language, lengths, test_size, set(train), random))
    return Splits(train, tuple(test), held_out)


def _unseen(language: Language, lengths: list[int], size: int, seen: set[str], random: Random) -> tuple[str, ...]:
    """Different strings, none of them among those seen."""
    found: dict[str, None] = {}
    while len(found) < size:  # there are enough: a bin with fewer is taken whole
        string = language.sample(random.choice(lengths), random)
        if string not in seen:
            found[string] = None
    return tuple(found)
