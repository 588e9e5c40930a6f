"""What the reliability tests record, and trials of random input.

A run is full if the environment variable RSA_HF_RELIABILITY is "full", as under `make test-reliability`. Outcomes are
appended to the file that RSA_HF_RELIABILITY_RECORD names, if it is set; `scripts/write_reliability.py` makes
RELIABILITY.md of them.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from random import Random

SEED = 0
SECONDS = 10  # of processor time for one case
LONGEST_MESSAGE = 20_000


class Part(Enum):
    """The promises, in the order of the page."""

    HOSTILE_FILES = "A hostile file is refused, or gives the right answer"
    NUMBERS = "Extreme numbers give finite and right results"
    MANY_MODELS = "Models in one process do not affect each other"


def is_full() -> bool:
    """Whether this is `make test-reliability`."""
    return os.environ.get("RSA_HF_RELIABILITY") == "full"


def note(part: Part, kind: str, outcomes: Mapping[str, int | float], seed: int | None = None) -> None:
    """Record what was tried, and the count of each outcome or the value of each measured quantity."""
    path = os.environ.get("RSA_HF_RELIABILITY_RECORD")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part.name, "kind": kind, "seed": seed, "came out": dict(outcomes)}) + "\n")


def resident_bytes() -> int:
    """The resident memory of this process, from /proc."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Hang(BaseException):
    """A case took too long. It is no Exception, so that `except Exception` does not catch it."""


@contextmanager
def time_limit():
    """Raise `Hang` after `SECONDS` of processor time, which other programs do not use up."""

    def ring(*_):
        raise Hang(f"no answer after {SECONDS} seconds")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def try_many(
    kind: str, case: Callable[[Random], str | None], documented: tuple[type[BaseException], ...], fast: int, full: int
) -> Counter[str]:
    """Run a case with `fast` random generators, or `full` in a full run, and count the outcomes.

    A case raises one of the documented errors, or checks that the answer is right; it may return another name for this
    outcome. Any other error ends the test with its seed.
    """
    outcomes: Counter[str] = Counter()
    for seed in range(SEED, SEED + (full if is_full() else fast)):
        message = "refused"
        try:
            with time_limit():
                outcomes[case(Random(seed)) or "right answer"] += 1
        except documented as error:
            message = str(error).strip()
            outcomes[f"refused: {type(error).__name__}"] += 1
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {str(error)[:2000]}") from error
        assert 0 < len(message) <= LONGEST_MESSAGE, f"{kind}, seed {seed}: a message of {len(message)} characters"
    note(Part.HOSTILE_FILES, kind, outcomes, seed=SEED)
    return outcomes
