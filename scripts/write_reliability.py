"""RELIABILITY.md from what `make test-reliability` wrote down: what was tried, how often, what came out.

python scripts/write_reliability.py outputs/reliability.jsonl
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from experiments.runner.processes import machine, versions
from reliability.record import Part

HEAD = """# What rsa_hf promises when things go wrong, and how that was tried

Made by `make test-reliability`; every figure is from that run. Each table says what was tried and what came out: how
often, or how much. Below it stand protections that the promise rests on: each was taken out, and the named test went
red.
"""


def page(lines: Sequence[dict[str, Any]]) -> str:
    """The page for the lines of a run; a promise without a line says that it was not tried."""
    parts = [HEAD]
    began = [line["began"] for line in lines if "began" in line]
    if began:
        found = ", ".join(f"{name} {version}" for name, version in versions().items())
        parts.append(f"\nThe run took {(time.time() - began[0]) / 60:.0f} minutes on {machine()} ({found}).\n")
    lines = [line for line in lines if "part" in line]
    for number, part in enumerate(Part, 1):
        parts.append(f"\n## {number}. {part.value}\n")
        mine = [line for line in lines if line["part"] == part.name]
        trials = [line for line in mine if "kind" in line]
        mutations = [line for line in mine if "protection" in line]
        if not trials:
            parts.append("\nNot tried in this run.\n")
        else:
            parts.append("\n| what was tried | what came out | first seed |\n|---|---|---|\n")
        for line in trials:
            came_out = "; ".join(f"{name}: {_number(value)}" for name, value in line["came out"].items())
            parts.append(f"| {line['kind']} | {came_out} | {'' if line['seed'] is None else line['seed']} |\n")
        if mutations:
            parts.append("\n| taken out | went red |\n|---|---|\n")
            parts += [f"| {line['protection']} | `{line['red']}` |\n" for line in mutations]
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


if __name__ == "__main__":
    record = Path(sys.argv[1]).read_text(encoding="utf-8")
    Path("RELIABILITY.md").write_text(page([json.loads(line) for line in record.splitlines()]), encoding="utf-8")
