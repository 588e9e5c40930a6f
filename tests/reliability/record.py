"""What `make test-reliability` writes down: a line a trial, from which `scripts/write_reliability.py` makes its page.

The lines go to the file that the environment variable RSA_HF_RELIABILITY_RECORD names; nowhere, if it is not set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum


class Part(Enum):
    """What is promised, in the order of the page."""

    CRASH = "A run that is killed goes on as if it had not been"
    STORAGE = "A full disk or a second writer loses nothing"
    HOSTILE_FILES = "A hostile file is refused or answered rightly"
    NUMBERS = "Extreme numbers stay finite and right"
    MANY_MODELS = "Models of one process do not touch each other"
    MOVING_TRANSFORMERS = "A moved internal of transformers is named"
    SOAK = "A long run stays flat"
    DOCTOR = "A user's own model is checked"


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
    """Write down that a test goes red without a protection.

    Args:
        part: the promise that the protection keeps.
        protection: what was taken out.
        red: the test that failed then.
    """
    _write({"part": part.name, "protection": protection, "red": red})


def _write(line: Mapping[str, object]) -> None:
    path = os.environ.get("RSA_HF_RELIABILITY_RECORD")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
