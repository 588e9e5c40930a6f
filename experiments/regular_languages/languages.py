"""Regular languages for next-character prediction: their automata, and the strings to train and test on.

After Bhattamishra et al., 2020, On the Ability and Limitations of Transformers to Recognize Formal Languages (arXiv
2009.11264).
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any


@dataclass(eq=False)
class Automaton:
    """A deterministic finite automaton without dead states: every transition leads to some string of the language.

    Strings are sampled uniformly among those of their length.
    """

    alphabet: str
    transitions: Mapping[str, Mapping[str, str]]  # the next state by state and character
    accepting: frozenset[str]
    start: str
    # completions[r][s]: number of ways from state s to an accepting state in r characters.
    completions: list[dict[str, int]] = field(default_factory=list, init=False, repr=False)

    def step(self, state: str, character: str) -> str | None:
        """The next state, None if `character` is not legal."""
        return self.transitions[state].get(character)

    def accepts(self, state: str) -> bool:
        """Whether a string may end in this state."""
        return state in self.accepting

    def count(self, length: int) -> int:
        """Number of strings of `length` characters."""
        return self._completions(length)[self.start]

    def sample(self, length: int, random: Random) -> str:
        """One of the strings of `length` characters, of which there must be one, all equally likely."""
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
            table.append({s: int(self.accepts(s)) for s in self.transitions})
        while len(table) <= length:
            table.append({s: sum(table[-1][after] for after in ways.values()) for s, ways in self.transitions.items()})
        return table[length]


def _cycle(word: str) -> Automaton:
    """(word)*: the state is the number of characters of the word read so far."""
    size = len(word)
    transitions = {str(i): {word[i]: str((i + 1) % size)} for i in range(size)}
    return Automaton("".join(sorted(set(word))), transitions, frozenset({"0"}), "0")


def _brackets(depth: int) -> Automaton:
    """Well-nested brackets, at most `depth` of them open; the state is how many are."""
    transitions = {str(n): {"(": str(n + 1)} | {")": str(n - 1)} for n in range(1, depth)}
    transitions |= {"0": {"(": "1"}, str(depth): {")": str(depth - 1)}}
    return Automaton("()", transitions, frozenset({"0"}), "0")


def _binary(accepting: str, **states: str) -> Automaton:
    """An automaton over 0 and 1, starting in the first state: name="state after 0, after 1", "-" if not legal."""
    transitions = {
        name: {character: after for character, after in zip("01", ways.split(), strict=True) if after != "-"}
        for name, ways in states.items()
    }
    return Automaton("01", transitions, frozenset(accepting.split()), next(iter(states)))


# Tomita, 1982, Dynamic construction of finite automata from examples using hill-climbing. d-n is D_n = (a D_{n−1} b)*
# of Bhattamishra et al., 2020: brackets, at most n deep.
LANGUAGES: dict[str, Automaton] = {
    "parity": _binary("even", even="even odd", odd="odd even"),  # an even number of 1
    "(aa)*": _cycle("aa"),
    "(abab)*": _cycle("abab"),
    "tomita-1": _binary("only", only="- only"),  # 1*
    "tomita-2": _binary("zero", zero="- one", one="zero -"),  # (10)*
    # After an odd run of 1 no odd run of 0.
    "tomita-3": _binary("even odd paired", even="even odd", odd="single even", single="paired -", paired="single odd"),
    "tomita-4": _binary("none one two", none="one none", one="two none", two="- none"),  # no 000
    # An even number of 0 and an even number of 1.
    "tomita-5": _binary("ee", ee="oe eo", oe="ee oo", eo="oo ee", oo="eo oe"),
    "tomita-6": _binary("r0", r0="r1 r2", r1="r2 r0", r2="r0 r1"),  # numbers of 0 and 1 differ by a multiple of 3
    "tomita-7": _binary("a b c d", a="a b", b="c b", c="c d", d="- d"),  # 0*1*0*1*
    "d-2": _brackets(2),
    "d-4": _brackets(4),
}


def legal_next(language: Automaton, string: str) -> list[tuple[frozenset[str], bool]]:
    """The targets of next-character prediction (Bhattamishra et al., 2020, section 3).

    They are, for each of the len(string) + 1 prefixes, the empty one first: the characters that may follow, and
    whether it may end here. A KeyError if no string of the language begins like this.
    """
    state: Any = language.start
    targets = []
    for character in (*string, None):
        after: dict[str, Any] = {c: language.step(state, c) for c in language.alphabet}
        after = {c: reached for c, reached in after.items() if reached is not None}
        targets.append((frozenset(after), language.accepts(state)))
        if character is not None:
            state = after[character]
    return targets


def all_strings(language: Automaton, length: int) -> list[str]:
    """Every string of `length` characters, by walking through all prefixes."""
    prefixes: list[tuple[str, Any]] = [("", language.start)]
    for _ in range(length):
        prefixes = [
            (string + c, after)
            for string, state in prefixes
            for c in language.alphabet
            if (after := language.step(state, c)) is not None
        ]
    return [string for string, state in prefixes if language.accepts(state)]


@dataclass(frozen=True)
class Splits:
    """Strings of the first bin's lengths to train on, distinct ones of each bin to test on.

    Unless `held_out`, the test strings of the first bin are trained on.
    """

    train: tuple[str, ...]
    test: tuple[tuple[str, ...], ...]
    held_out: bool


def make_splits(
    language: Automaton, train_size: int, test_size: int, seed: int, bins: tuple[tuple[int, int], ...]
) -> Splits:
    """Draw strings of a language: first a length, uniformly among those that occur, then a string of it.

    Training strings may repeat. A bin, given by its first and last length, with no more strings than asked for is
    taken whole. If that is the first bin, as for (aa)*, Tomita-1 and Tomita-2, with a string per length at most, it is
    used for both training and test: each string is a prefix of the next, so nothing could be held out.
    """
    random = Random(seed)
    test, train, held_out = list[tuple[str, ...]](), tuple[str, ...](), True
    for number, (low, high) in enumerate(bins):
        lengths = [length for length in range(low, high + 1) if language.count(length)]
        wanted = test_size + (train_size if number == 0 else 0)
        small = sum(language.count(length) for length in lengths) <= wanted
        whole = tuple(string for length in lengths for string in all_strings(language, length)) if small else ()
        if number == 0:
            held_out = not small
            train = whole or tuple(language.sample(random.choice(lengths), random) for _ in range(train_size))
        test.append(whole or _unseen(language, lengths, test_size, set(train), random))
    return Splits(train, tuple(test), held_out)


def _unseen(language: Automaton, lengths: list[int], size: int, seen: set[str], random: Random) -> tuple[str, ...]:
    """Distinct strings, none of them among those seen."""
    found: dict[str, None] = {}
    while len(found) < size:  # terminates: a bin with fewer strings is taken whole
        string = language.sample(random.choice(lengths), random)
        if string not in seen:
            found[string] = None
    return tuple(found)
