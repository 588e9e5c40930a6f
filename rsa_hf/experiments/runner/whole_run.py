"""How long `rsa-hf reproduce all` took: what the sum of the cells' times does not say, several running at a time."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from rsa_hf.experiments.runner.experiment import Size
from rsa_hf.experiments.runner.machine import machine
from rsa_hf.experiments.runner.runner import FOLDER, read_results

__all__ = ["is_fresh", "keep_time", "time_in_words"]


def is_fresh(root: Path, size: Size, names: Collection[str]) -> bool:
    """Whether nothing of these experiments has run yet, so that a run of all of them is a whole one.

    Raises:
        RequestError: a kept file is damaged.
    """
    return not any(read_results(root / FOLDER / name / size) for name in names)


def keep_time(root: Path, size: Size, seconds: float, jobs: int) -> None:
    """Keep how long a whole run took.

    Args:
        root: the folder that has `results/reproduce`.
        size: of the experiments.
        seconds: wall time.
        jobs: cells at a time.
    """
    record = {"seconds": round(seconds, 1), "jobs": jobs, "machine": machine()}
    _path(root, size).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def time_in_words(root: Path, size: Size) -> str:
    """A sentence on it, or nothing where no whole run has been kept."""
    path = _path(root, size)
    if not path.exists():
        return ""
    record = json.loads(path.read_text(encoding="utf-8"))
    minutes, seconds = divmod(round(record["seconds"]), 60)
    return (
        f"`rsa-hf reproduce all --{size}`, with nothing kept from before, took {minutes} min {seconds} s, "
        f"{record['jobs']} cells at a time, on {record['machine']}."
    )


def _path(root: Path, size: Size) -> Path:
    return root / FOLDER / f"all_{size}.json"
