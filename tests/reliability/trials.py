"""Trials of random input; many of them under `make test-reliability`, which sets RSA_HF_RELIABILITY=full."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from random import Random

SEED = 0
SECONDS = 10  # of processor time for one case
LONGEST_MESSAGE = 20_000


def is_full() -> bool:
    """Whether this is `make test-reliability`."""
    return os.environ.get("RSA_HF_RELIABILITY") == "full"


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
    return outcomes
