"""Run an experiment: one cell after the other, each kept as soon as it is finished, so that a run can be broken off.

A run has the folder `results/reproduce/NAME/SIZE`: cells.jsonl, a line a finished cell; table.csv and table.md, means
with intervals; figure.png; conclusion.json, the verdict; configuration.json, every setting and what it ran on.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rsa_hf.reproduce.cells import Cell, Result
from rsa_hf.reproduce.experiment import Conclusion, Experiment, Size, cell_key
from rsa_hf.reproduce.machine import versions
from rsa_hf.reproduce.processes import run_cells
from rsa_hf.reproduce.summary import Row

__all__ = ["FOLDER", "read_results", "run_experiment"]

FOLDER = Path("results") / "reproduce"
KEPT = "cells.jsonl"


def run_experiment(
    experiment: Experiment, size: Size, root: Path, seeds: int | None = None, progress: bool = True, jobs: int = 1
) -> Conclusion:
    """Run what has not run yet, and write table, figure, conclusion and configuration.

    Args:
        experiment: which.
        size: how large.
        root: the folder that has, or gets, `results/reproduce`.
        seeds: how many; default what the experiment has for this size.
        progress: show a bar.
        jobs: how many cells run at a time, see `run_cells`.

    Returns:
        What the rows say about the claim.

    Raises:
        FileNotFoundError: data is missing.
        ImportError: a package is missing.
        ValueError: `seeds` or `jobs` is below 1, or a kept file cannot be read.
    """
    if seeds is None:
        seeds = experiment.seeds[size]
    for name, number in (("seeds", seeds), ("jobs", jobs)):
        if number < 1:
            raise ValueError(f"{name} is {number}; at least 1 is needed.")
    cells = {cell_key(cell, experiment.revision): cell for cell in experiment.cells(size, seeds)}
    folder = root / FOLDER / experiment.name / size
    folder.mkdir(parents=True, exist_ok=True)
    kept = read_results(folder)
    left = {key: cell for key, cell in cells.items() if key not in kept}
    with tqdm(total=len(cells), initial=len(cells) - len(left), desc=experiment.name, disable=not progress) as bar:
        for key, result in run_cells(experiment.run_cell, left, jobs):
            kept[key] = result
            _write(folder / KEPT, "".join(_line(key, result) for key, result in kept.items()))
            bar.set_postfix_str(f"done: {_words(result.cell)}", refresh=False)
            bar.update()
    results = [kept[key] for key in cells]
    rows = experiment.summarise(results)
    conclusion = experiment.conclude(rows)
    _write(folder / "table.csv", _csv(rows))
    _write(folder / "table.md", _markdown(rows))
    experiment.draw(results, folder / "figure.png")
    _write(folder / "conclusion.json", _json(asdict(conclusion)))
    configuration = {
        "experiment": experiment.name,
        "claim": experiment.claim,
        "published": experiment.published,
        "size": size,
        "seeds": seeds,
        "revision": experiment.revision,
        "command": f"rsa-hf reproduce {experiment.name} --{size}"
        + (f" --seeds {seeds}" if seeds != experiment.seeds[size] else ""),
        "seconds": round(sum(result.seconds for result in results), 1),
        "machines": sorted({result.machine for result in results}),
        "versions": versions(),
        "cells": [dict(cell) for cell in cells.values()],
    }
    _write(folder / "configuration.json", _json(configuration))
    return conclusion


def read_results(folder: Path) -> dict[str, Result]:
    """The finished cells of a folder, by key.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / KEPT
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            key = record.pop("key")
            found[key] = Result(**record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}, is not a finished cell ({error}); delete the line to run it again."
            ) from error
    return found


def _line(key: str, result: Result) -> str:
    return json.dumps({"key": key, **asdict(result)}, ensure_ascii=False) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    """Write beside and rename: a run that is broken off leaves the old file or the new one."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _words(cell: Cell) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items())


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.settings))


def _csv(rows: Sequence[Row]) -> str:
    names = _columns(rows)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*names, "measure", "mean", "low", "high", "seeds"])
    for row in rows:
        settings = [row.settings.get(name, "") for name in names]
        writer.writerow([*settings, row.measure, row.mean, row.low, row.high, row.seeds])
    return file.getvalue()


def _markdown(rows: Sequence[Row]) -> str:
    names = _columns(rows)
    lines = [_cells([*names, "measure", "mean", "95 % interval", "seeds"]), "|" + "---|" * (len(names) + 4)]
    for row in rows:
        ends = "" if math.isnan(row.low) else f"{row.low:.4g} … {row.high:.4g}"
        settings = [str(row.settings.get(name, "")) for name in names]
        lines.append(_cells([*settings, row.measure, f"{row.mean:.4g}", ends, str(row.seeds)]))
    return "\n".join(lines) + "\n"


def _cells(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"
