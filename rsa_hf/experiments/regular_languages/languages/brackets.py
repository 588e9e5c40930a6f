"""Languages of several kinds of brackets: Dyck-k of bounded depth, and the shuffle of two unbounded ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from random import Random

__all__ = ["DyckPrefixes", "Shuffle2"]

PAIRS = ("()", "[]", "{}", "<>")


@dataclass(frozen=True)
class DyckPrefixes:
    """Prefixes of well-nested strings of `kinds` kinds of brackets, at most `depth` of them open at a time.

    Of bounded depth it is a regular language (Dyck-(k, m) of Hewitt et al., 2020, RNNs can generate bounded
    hierarchical languages with optimal memory). The state is the string of the closing brackets still to come.

    Attributes:
        kinds: k, 1 to 4.
        depth: m.
    """

    kinds: int
    depth: int
    complete = False
    start = ""

    @property
    def alphabet(self) -> str:
        """The kinds of brackets, each opening before closing."""
        return "".join(PAIRS[: self.kinds])

    def step(self, state: str, character: str) -> str | None:
        """The closing brackets still to come, the next one last; None where `character` is not legal."""
        kind, closes = divmod(self.alphabet.index(character), 2)
        if closes:
            return state[:-1] if state.endswith(character) else None
        return state + PAIRS[kind][1] if len(state) < self.depth else None

    def accepts(self, state: str) -> bool:
        """Whether every bracket is closed."""
        return not state

    def count(self, length: int) -> int:
        """Number of prefixes of `length` characters."""
        ways = [1] + [0] * self.depth
        for _ in range(length):
            padded = [0, *ways, 0]
            ways = [self.kinds * padded[level] + padded[level + 2] for level in range(self.depth + 1)]
        return sum(ways)

    def sample(self, length: int, random: Random) -> str:
        """A walk of `length` characters: a bracket is opened or closed with probability ½ each, where both may be."""
        string, state = "", self.start
        for _ in range(length):
            opens = not state or (len(state) < self.depth and random.random() < 0.5)
            character = PAIRS[random.randrange(self.kinds)][0] if opens else state[-1]
            after = self.step(state, character)
            assert after is not None
            string, state = string + character, after
        return string


@dataclass(frozen=True)
class Shuffle2:
    """Two strings of well-nested brackets, () and [], of any depth, mixed: each kind is balanced for itself.

    A counter language, not a regular one (Suzgun et al., 2019, LSTM networks can perform dynamic counting). The state
    is how many brackets of each kind are open.
    """

    alphabet = "()[]"
    complete = True
    start = (0, 0)

    def step(self, state: tuple[int, int], character: str) -> tuple[int, int] | None:
        """The counts behind `character`; None where it closes what was not opened."""
        kind, closes = divmod(self.alphabet.index(character), 2)
        after = list(state)
        after[kind] += -1 if closes else 1
        return None if after[kind] < 0 else (after[0], after[1])

    def accepts(self, state: tuple[int, int]) -> bool:
        """Whether every bracket is closed."""
        return state == (0, 0)

    def count(self, length: int) -> int:
        """Number of strings of `length` characters."""
        if length % 2:
            return 0
        pairs = length // 2
        return sum(comb(length, 2 * k) * _catalan(k) * _catalan(pairs - k) for k in range(pairs + 1))

    def sample(self, length: int, random: Random) -> str:
        """A shuffle of two strings, each uniform among those of its length; a pair is of either kind with chance ½.

        Raises:
            ValueError: `length` is odd.
        """
        if length % 2:
            raise ValueError(f"length={length}: strings of balanced brackets have even lengths.")
        first = sum(random.random() < 0.5 for _ in range(length // 2))
        parts = [_balanced(first, PAIRS[0], random), _balanced(length // 2 - first, PAIRS[1], random)]
        places = set(random.sample(range(length), 2 * first))
        sources = [iter(part) for part in parts]
        return "".join(next(sources[place not in places]) for place in range(length))


def _catalan(n: int) -> int:
    return comb(2 * n, n) // (n + 1)


def _balanced(pairs: int, brackets: str, random: Random) -> str:
    """A balanced string of so many pairs, all equally likely.

    By the cycle lemma: exactly one rotation of n opening and n + 1 closing brackets stays balanced up to its last one.
    """
    steps = [1] * pairs + [-1] * (pairs + 1)
    random.shuffle(steps)
    height, lowest, turn = 0, 0, 0
    for place, step in enumerate(steps, 1):
        height += step
        if height < lowest:
            lowest, turn = height, place
    rotated = (steps[turn:] + steps[:turn])[:-1]
    return "".join(brackets[0] if step == 1 else brackets[1] for step in rotated)
