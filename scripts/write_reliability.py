"""RELIABILITY.md from what `make test-reliability` recorded: what was tried, how often, what came out.

python scripts/write_reliability.py outputs/reliability.jsonl
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reliability.record import Part

HEAD = """# What rsa_hf promises when things go wrong, and how that was tried

Made by `make test-reliability`; every figure is from that run. Each table says what was tried and what came out: how
often, or how much.
"""


def page(lines: Sequence[dict[str, Any]]) -> str:
    """The page for the lines of a run; a promise without a line says that it was not tried."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("rsa_hf", "torch", "transformers", "peft"))
    minutes = [f"{(time.time() - line['began']) / 60:.0f}" for line in lines if "began" in line]
    parts = [HEAD, f"\nThe run took {minutes[0]} minutes (python {platform.python_version()}, {packages}).\n"]
    for number, part in enumerate(Part, 1):
        parts.append(f"\n## {number}. {part.value}\n\n")
        trials = [line for line in lines if line.get("part") == part.name]
        parts.append("| what was tried | what came out | first seed |\n|---|---|---|\n" if trials else "Not tried.\n")
        for line in trials:
            came_out = "; ".join(f"{name}: {_number(value)}" for name, value in line["came out"].items())
            parts.append(f"| {line['kind']} | {came_out} | {'' if line['seed'] is None else line['seed']} |\n")
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path, help="the lines that the run recorded")
    parser.add_argument("--output", type=Path, default=Path("RELIABILITY.md"))
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.record.read_text(encoding="utf-8").splitlines()]
    arguments.output.write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
