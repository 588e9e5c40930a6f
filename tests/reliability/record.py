"""How often a thing is tried, and what `make test-reliability` writes down of it.

A run is full where the environment variable RSA_HF_RELIABILITY is "full", as under `make test-reliability`.
The lines go to the file that RSA_HF_RELIABILITY_RECORD names, if it is set, and from there into RELIABILITY.md by
`scripts/write_reliability.py`.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from enum import Enum
from random import Random

SEED = 0
SECONDS = 10  # of processor time, for one case
LONGEST_MESSAGE = 20_000
# How often a kind is tried, in a fast run and in a full one.
TIMES = {"plans": (600, 100_000), "run configs": (200, 5_000), "data lines": (500, 100_000), "patches": (100, 5_000)}
TIMES |= {"checkpoints": (125, 9_000), "adapters": (20, 1_000)}


class Part(Enum):
    """The promises, in the order of the page."""

    CRASH = "A run that is killed goes on as if it had not been"
    STORAGE = "A full disk or a second writer loses nothing"
    HOSTILE_FILES = "A hostile file is refused or answered rightly"
    NUMBERS = "Extreme numbers stay finite and right"
    MANY_MODELS = "Models of one process do not touch each other"
    MOVING_TRANSFORMERS = "A moved internal of transformers is named"
    SOAK = "A long run stays flat"
    DOCTOR = "A user's own model is checked"


def is_full() -> bool:
    """Whether this is `make test-reliability`."""
    return os.environ.get("RSA_HF_RELIABILITY") == "full"


def number_of(kind: str) -> int:
    """How often a kind is tried."""
    return TIMES[kind][is_full()]


def note(part: Part, kind: str, came_out: Mapping[str, int | float], seed: int | None = None) -> None:
    """Write a trial down.

    Args:
        part: the promise that it belongs to.
        kind: what was tried, e.g. "killed while a checkpoint is written".
        came_out: outcome → how often, or measured quantity → its value.
        seed: of the first case, where there is one.
    """
    _write({"part": part.name, "kind": kind, "seed": seed, "came out": dict(came_out)})


def note_mutation(part: Part, protection: str, red: str) -> None:
    """Write down that the test `red` fails without a protection."""
    _write({"part": part.name, "protection": protection, "red": red})


def _write(line: Mapping[str, object]) -> None:
    path = os.environ.get("RSA_HF_RELIABILITY_RECORD")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


# --- hostile input -------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """A case took too long; no `except Exception` may swallow it."""


@contextmanager
def time_limit():
    """Raise `Hang` after `SECONDS` of processor time: how busy the machine is does not count."""

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
        count: how many; default `number_of(kind)`.

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
