"""`metrics.jsonl`: the log of a run, one JSON object a line."""

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
    """A file of JSON lines with a `step` each. NaN and infinity are written as null.

    Args:
        path: the file. Its folder is created.
        writes: False on all processes but the main one: nothing is written.
    """

    def __init__(self, path: Path, writes: bool) -> None:
        self.path = path
        self.writes = writes
        if writes:
            with storage_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: dict[str, Any], report: RSAReport) -> None:
        """Add a line: the record and, for a patched model, gates and rates of each head under `rsa`."""
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
        """Wait until all lines are on the disk, before a checkpoint that follows them."""
        if self.writes and self.path.exists():
            with storage_errors(self.path.parent), self.path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def keep_until(self, step: int) -> None:
        """Delete lines after the step that a run continues from, and an incomplete last line."""
        if not self.writes or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # the run was killed while it wrote this line
            if record["step"] <= step:
                kept.append(line + "\n")
        write_text(self.path, "".join(kept))


def finite_or_null(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None in a value or in nested mappings and lists."""
    if isinstance(value, dict):
        return {key: finite_or_null(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
