"""Regular languages as deterministic finite automata, and strings drawn from them, each as likely as any other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

__all__ = ["AUTOMATA", "Automaton"]


@dataclass(eq=False)
class Automaton:
    """A deterministic finite automaton without dead states: what has no transition is in no string of the language.

    Attributes:
        alphabet: its characters.
        transitions: of each state, the state behind each character that may come next.
        accepting: the states in which a string may end.
        start: the first state.
    """

    alphabet: str
    transitions: Mapping[str, Mapping[str, str]]
    accepting: frozenset[str]
    start: str
    complete: bool = field(default=True, init=False)
    # completions[r][s]: number of ways from state s to an accepting state in r characters.
    completions: list[dict[str, int]] = field(default_factory=list, init=False, repr=False)

    def step(self, state: str, character: str) -> str | None:
        """The state behind `character`, None where it is not legal."""
        return self.transitions[state].get(character)

    def accepts(self, state: str) -> bool:
        """Whether a string may end in this state."""
        return state in self.accepting

    def count(self, length: int) -> int:
        """Number of strings of `length` characters."""
        return self._completions(length)[self.start]

    def sample(self, length: int, random: Random) -> str:
        """One of the strings of `length` characters, all equally likely.

        Raises:
            ValueError: the language has none.
        """
        if not self.count(length):
            raise ValueError(f"length={length}: the language has no string of this length.")
        state, string = self.start, ""
        for left in reversed(range(length)):
            after = self.transitions[state]
            ways = [self._completions(left)[target] for target in after.values()]
            # Not random.choices, whose weights are floats: there may be 2¹⁵⁰ ways.
            chosen = bisect_right(list(accumulate(ways)), random.randrange(sum(ways)))
            character, state = list(after.items())[chosen]
            string += character
        return string

    def _completions(self, length: int) -> dict[str, int]:
        table = self.completions
        if not table:
            table.append({state: int(state in self.accepting) for state in self.transitions})
        while len(table) <= length:
            table.append(
                {s: sum(table[-1][after] for after in self.transitions[s].values()) for s in self.transitions}
            )
        return table[length]


def _cycle(word: str) -> Automaton:
    """(word)*: the state is the number of characters of the word that were read."""
    size = len(word)
    transitions = {str(i): {word[i]: str((i + 1) % size)} for i in range(size)}
    return Automaton("".join(sorted(set(word))), transitions, frozenset({"0"}), "0")


def _nested(depth: int) -> Automaton:
    """D_n = (a D_{n−1} b)*, D_0 = {ε}: brackets of one kind, at most `depth` deep; the state is how deep."""
    transitions: dict[str, dict[str, str]] = {}
    for level in range(depth + 1):
        transitions[str(level)] = {}
        if level < depth:
            transitions[str(level)]["("] = str(level + 1)
        if level > 0:
            transitions[str(level)][")"] = str(level - 1)
    return Automaton("()", transitions, frozenset({"0"}), "0")


def _binary(accepting: str, **states: str) -> Automaton:
    """An automaton over 0 and 1, the first state first: name="after 0, after 1", "-" where there is no way on."""
    transitions = {
        name: {character: after for character, after in zip("01", ways.split(), strict=True) if after != "-"}
        for name, ways in states.items()
    }
    return Automaton("01", transitions, frozenset(accepting.split()), next(iter(states)))


# Tomita, 1982, Dynamic construction of finite automata from examples using hill-climbing; D_n as Bhattamishra et al.,
# 2020, have it.
AUTOMATA = {
    # An even number of 1.
    "parity": _binary("even", even="even odd", odd="odd even"),
    "(aa)*": _cycle("aa"),
    "(abab)*": _cycle("abab"),
    # 1*
    "tomita-1": _binary("only", only="- only"),
    # (10)*
    "tomita-2": _binary("zero", zero="- one", one="zero -"),
    # After an odd run of 1 no odd run of 0.
    "tomita-3": _binary("even odd paired", even="even odd", odd="single even", single="paired -", paired="single odd"),
    # No 000.
    "tomita-4": _binary("none one two", none="one none", one="two none", two="- none"),
    # An even number of 0 and an even number of 1.
    "tomita-5": _binary("ee", ee="oe eo", oe="ee oo", eo="oo ee", oo="eo oe"),
    # The numbers of 0 and of 1 differ by a multiple of 3.
    "tomita-6": _binary("r0", r0="r1 r2", r1="r2 r0", r2="r0 r1"),
    # 0*1*0*1*
    "tomita-7": _binary("a b c d", a="a b", b="c b", c="c d", d="- d"),
    "d-2": _nested(2),
    "d-4": _nested(4),
}
