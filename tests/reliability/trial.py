"""Run hostile input by the hundred: each is refused in a documented way or answered rightly, in bounded time.

How many: a few, or those of `FULL` where the environment variable RSA_HF_RELIABILITY is "full", as under
`make test-reliability`. What came out is written down, see `reliability.record`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from random import Random

from reliability.record import Part, note

SEED = 0
SECONDS = 10  # for one case
LONGEST_MESSAGE = 20_000
FAST = {"plans": 600, "run configs": 200, "data lines": 500, "patches": 100, "checkpoints": 125, "adapters": 20}
FULL = {
    "plans": 100_000,
    "run configs": 20_000,
    "data lines": 100_000,
    "patches": 5_000,
    "checkpoints": 9_000,
    "adapters": 1_000,
}


class Hang(BaseException):
    """A case took too long; no `except Exception` may swallow it."""


@contextmanager
def time_limit(seconds: float = SECONDS):
    def ring(*_):
        raise Hang(f"no answer after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_full() -> bool:
    """Whether this is `make test-reliability`."""
    return os.environ.get("RSA_HF_RELIABILITY") == "full"


def number_of(kind: str) -> int:
    """How often a kind is tried."""
    return (FULL if is_full() else FAST)[kind]


def try_many(
    kind: str,
    case: Callable[[Random], str | None],
    documented: tuple[type[BaseException], ...],
    count: int | None = None,
) -> Counter[str]:
    """Run a case with one generator after the other.

    Args:
        kind: what is tried.
        case: what to do; it raises one of the documented errors, or has checked that the answer is right. It may
            return a word to count the answer under.
        documented: the errors that a refusal may be.
        count: how many; default as the kind has it.

    Raises:
        AssertionError: naming the seed of the first case that came out otherwise.
    """
    came_out: Counter[str] = Counter()
    for seed in range(SEED, SEED + (number_of(kind) if count is None else count)):
        message = None
        try:
            with time_limit():
                came_out[case(Random(seed)) or "right answer"] += 1
        except documented as error:
            message = str(error)
            came_out[f"refused: {type(error).__name__}"] += 1
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {str(error)[:2000]}") from error
        assert message is None or message.strip(), f"{kind}, seed {seed}: an error that says nothing"
        assert len(message or "") <= LONGEST_MESSAGE, f"{kind}, seed {seed}: a message of {len(message)} characters"
    note(Part.HOSTILE_FILES, kind, came_out, seed=SEED)
    return came_out
