"""Measurements with a page of their own in results/, beside the experiments of RESULTS.md.

Each is the module of its name and has a function `write(folder, size, seeds)`, which measures and writes the page and
the record into a folder. The quick size writes files that end in `_quick`, and so replaces no full page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.runner.experiment import Size
from experiments.runner.runner import write_json

PAGES = {
    "devign": "MiniLM with and without RSA heads on 2,000 functions of Devign",
    "blimp": "BLiMP by lm-eval: SmolLM2 plain, with shut gates, with RSAConfig() and calibrated",
}


def write_page(folder: Path, name: str, size: Size, record: Any, text: str) -> None:
    """Write `name`.json and .md, and print the page."""
    stem = name if size == "full" else f"{name}_{size}"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{stem}.json", record)
    (folder / f"{stem}.md").write_text(text, encoding="utf-8")
    print(text)


def command(name: str, size: Size, seeds: int | None = None) -> str:
    """The command that makes a page."""
    return f"python -m experiments {name} --{size}" + (f" --seeds {seeds}" if seeds else "")
