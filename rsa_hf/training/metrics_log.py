"""`metrics.jsonl`: what happened during a run, one JSON line each time."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rsa_hf.report import RSAReport
from rsa_hf.utils.files import storage_errors, write_text

__all__ = ["MetricsLog", "finite_or_null"]


class MetricsLog:
    """A file of JSON lines, each with the `step` that it is about.

    A number that is NaN or infinite is written as null, which every reader of JSON takes.

    Args:
        path: the file; its folder is made.
        writes: False: nothing is written, as on all processes but the main one.
    """

    def __init__(self, path: Path, writes: bool) -> None:
        self.path = path
        self.writes = writes
        if writes:
            with storage_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: dict[str, Any], report: RSAReport) -> None:
        """Add a line: the record and, of a patched model, gates and rates by layer and head under `rsa`."""
        if not self.writes:
            return
        layers = {
            layer.module: {
                "gate": [head.gate for head in layer.heads],
                "decay": [head.decay for head in layer.heads],
                "theta": [head.theta for head in layer.heads],
            }
            for layer in report.layers
        }
        line = json.dumps(finite_or_null({**record, "rsa": layers} if layers else record), allow_nan=False)
        with storage_errors(self.path.parent), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def flush(self) -> None:
        """Wait until all lines are on the disk, where a checkpoint that follows them will be."""
        if self.writes and self.path.exists():
            with storage_errors(self.path.parent), self.path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def keep_until(self, step: int) -> None:
        """Drop the lines after a step, from which a run is continued, and a line that was never finished."""
        if not self.writes or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # the run was killed while it wrote this
            if record["step"] <= step:
                kept.append(line + "\n")
        write_text(self.path, "".join(kept))


def finite_or_null(value: Any) -> Any:
    """Mappings, lists, tuples and values with None where a number is NaN or infinite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite_or_null(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
