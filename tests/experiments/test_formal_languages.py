"""Formal languages: strings and targets against recognisers that share no code with the package."""

import itertools
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.regular_languages.languages import LANGUAGES, Automaton, all_strings, legal_next, make_splits

BINS = ((2, 50), (51, 100), (101, 150))
# Regular expressions from the definitions of the languages.
PATTERNS = {
    "parity": r"0*(10*10*)*",
    "(aa)*": r"(aa)*",
    "(abab)*": r"(abab)*",
    "tomita-1": r"1*",
    "tomita-2": r"(10)*",
    "tomita-3": r"(?!(.*0)?(11)*1(00)*0(1|$)).*",
    "tomita-4": r"(?!.*000).*",
    "tomita-7": r"0*1*0*1*",
    "d-2": r"(\((\(\))*\))*",
    "d-4": r"(\((\((\((\(\))*\))*\))*\))*",
}
COUNTS = {
    "tomita-5": lambda string: string.count("0") % 2 == 0 == string.count("1") % 2,
    "tomita-6": lambda string: (string.count("0") - string.count("1")) % 3 == 0,
}
AUTOMATA = [*PATTERNS, *COUNTS]


def recognised(name, string):
    return COUNTS[name](string) if name in COUNTS else re.fullmatch(PATTERNS[name], string) is not None


def disagreements(name, language, longest=7, ahead=4):
    """Prefixes and lengths for which targets or strings differ from those found by trying every string."""
    every = ["".join(s) for n in range(longest + ahead + 2) for s in itertools.product(language.alphabet, repeat=n)]
    accepted = {string for string in every if recognised(name, string)}
    prefixes = {string[:end] for string in accepted for end in range(len(string) + 1)}
    wrong = []
    for string in (string for string in prefixes if len(string) <= longest):
        expected = ({c for c in language.alphabet if string + c in prefixes}, string in accepted)
        if legal_next(language, string)[-1] != expected:
            wrong.append(string)
    for length in range(longest + 1):
        strings = sorted(string for string in accepted if len(string) == length)
        if sorted(all_strings(language, length)) != strings or language.count(length) != len(strings):
            wrong.append(length)
    for string in (string for string in every if len(string) <= longest and string not in prefixes):
        with pytest.raises(KeyError):
            legal_next(language, string)
    return wrong


@pytest.mark.parametrize("name", AUTOMATA)
def test_an_automaton_agrees_with_its_definition(name):
    assert not disagreements(name, LANGUAGES[name])


def test_a_wrong_automaton_is_caught():
    # Tomita-3, except that a string may end in an odd run of 0 after an odd run of 1.
    right = LANGUAGES["tomita-3"]
    wrong = Automaton(right.alphabet, right.transitions, right.accepting | {"single"}, right.start)
    assert "10" in disagreements("tomita-3", wrong)


@pytest.mark.parametrize("name", LANGUAGES)
@given(length=st.integers(0, 150), seed=st.integers(0, 2**32))
def test_sampled_strings_are_in_their_language(name, length, seed):
    language = LANGUAGES[name]
    if not language.count(length):
        return
    string = language.sample(length, Random(seed))
    assert len(string) == length and string == language.sample(length, Random(seed))
    targets = legal_next(language, string)
    assert [may_end for _, may_end in targets] == [recognised(name, string[:end]) for end in range(length + 1)]
    assert targets[-1][1]


@pytest.mark.parametrize("name", LANGUAGES)
def test_bins_hold_distinct_strings_of_their_lengths(name):
    splits = make_splits(LANGUAGES[name], 60, 50, 3, BINS)
    assert splits == make_splits(LANGUAGES[name], 60, 50, 3, BINS)
    for strings, (low, high) in zip((splits.train, *splits.test), (BINS[0], *BINS), strict=True):
        assert {low <= len(string) <= high for string in strings} == {True}
    assert all(len(set(strings)) == len(strings) for strings in splits.test)
    assert splits.held_out is (name not in ("(aa)*", "(abab)*", "tomita-1", "tomita-2"))  # with one string per length
    if splits.held_out:
        assert [len(splits.train), *map(len, splits.test)] == [60, 50, 50, 50]
        assert not set(splits.train) & set(splits.test[0])
        assert splits != make_splits(LANGUAGES[name], 60, 50, 4, BINS)
    else:
        assert splits.train == splits.test[0]
