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
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tqdm import tqdm

from rsa_hf.experiments.runner.cells import Cell, Result
from rsa_hf.experiments.runner.conclusion import Conclusion
from rsa_hf.experiments.runner.experiment import Experiment, Size, cell_key
from rsa_hf.experiments.runner.processes import Workers, run_cells
from rsa_hf.experiments.runner.rate_search import cells_to_run, number_of_runs, results_of_all_seeds
from rsa_hf.experiments.runner.summary import Row

__all__ = ["FOLDER", "RequestError", "read_results", "run_experiment"]

FOLDER = Path("results") / "reproduce"
KEPT = "cells.jsonl"
LOCK = ".lock"  # of the cells, while they are read and written


class RequestError(ValueError):
    """What was asked for cannot be run, or is not there yet; the message says what can."""


def run_experiment(
    experiment: Experiment,
    size: Size,
    root: Path,
    seeds: int | None = None,
    only: Mapping[str, Collection[str]] | None = None,
    progress: bool = True,
    workers: Workers | None = None,
) -> Conclusion:
    """Run what has not run yet, and write table, figure, conclusion and configuration.

    They are made of all cells of this size that have run for every seed, in this call or an earlier one, here or on
    another machine. Without a GPU, cells that need one are passed over.

    Args:
        experiment: which.
        size: how large.
        root: the folder that has, or gets, `results/reproduce`.
        seeds: how many; default what the experiment has for this size.
        only: run the cells alone that have one of these values, as words, in each of these settings.
        progress: show a bar.
        workers: who runs the cells; None: this process, one after the other.

    Returns:
        What the rows say about the claim.

    Raises:
        MissingDataError: data is missing.
        ImportError: a package is missing.
        RequestError: `seeds` is below 1, `only` fits no cell, all that it fits need a GPU and there is none, what has
            run makes no comparison yet, or a kept file cannot be read.
    """
    if seeds is None:
        seeds = experiment.seeds[size]
    if seeds < 1:
        raise RequestError(f"seeds is {seeds}; at least 1 is needed.")
    cells = {cell_key(cell, experiment.revision): cell for cell in experiment.cells(size, seeds)}
    folder = root / FOLDER / experiment.name / size
    folder.mkdir(parents=True, exist_ok=True)
    kept = read_results(folder)
    chosen = _for_this_machine(experiment, _chosen(experiment, cells, only or {}))
    score = experiment.search_by
    done, total = len(cells_to_run(chosen, kept, score).keys() & kept.keys()), number_of_runs(chosen, score)
    with tqdm(total=total, initial=done, desc=experiment.name, disable=not progress) as bar:
        # What came of a search of learning rates says what there is left to run.
        while left := {key: cell for key, cell in cells_to_run(chosen, kept, score).items() if key not in kept}:
            for key, result in run_cells(experiment.run_cell, left, workers):
                # Another process may have run other cells meanwhile, of another part for instance, and write now.
                with FileLock(folder / LOCK):
                    kept = {**read_results(folder), **kept, key: result}
                    _write(folder / KEPT, "".join(_line(key, result) for key, result in kept.items()))
                bar.set_postfix_str(f"done: {_words(result.cell)}", refresh=False)
                bar.update()
    results = results_of_all_seeds(cells, kept, score)
    rows = experiment.summarise(results)
    if not rows:
        raise RequestError(f"{folder}: what has run makes no comparison yet; run the other arms too.")
    conclusion = experiment.conclude(rows)
    _write(folder / "table.csv", _csv(rows))
    _write(folder / "table.md", _markdown(rows))
    experiment.draw(results, folder / "figure.png")
    _write(folder / "conclusion.json", _json(asdict(conclusion)))
    shown = [result.cell for result in results]
    configuration = {
        "experiment": experiment.name,
        "claim": experiment.claim,
        "published": experiment.published,
        "size": size,
        "seeds": seeds,
        "revision": experiment.revision,
        "command": _command(experiment, size, seeds, cells.values(), shown),
        "seconds": round(sum(result.seconds for result in results), 1),
        "machines": sorted({result.machine for result in results}),
        # Those that its cells ran with: more than one, where a run was gone on with after an upgrade.
        "versions": [dict(each) for each in dict.fromkeys(tuple(result.versions.items()) for result in results)],
        "cells": [dict(cell) for cell in shown],
        "meanings": experiment.meanings(shown),
        "planned": number_of_runs(cells, score),
        "left": _left(experiment, cells.values(), shown),
    }
    _write(folder / "configuration.json", _json(configuration))
    return conclusion


def _command(experiment: Experiment, size: Size, seeds: int, cells: Collection[Cell], shown: Collection[Cell]) -> str:
    """What runs the cells that are shown: of each setting that has parts, the values that occur among them."""
    words = [f"rsa-hf reproduce {experiment.name} --{size}"]
    if seeds != experiment.seeds[size]:
        words.append(f"--seeds {seeds}")
    for name in _left(experiment, cells, shown):
        found = dict.fromkeys(str(cell[name]) for cell in shown)
        words.append(shlex.join(["--only", f"{name}={','.join(found)}"]))
    return " ".join(words)


def _left(experiment: Experiment, cells: Collection[Cell], shown: Collection[Cell]) -> dict[str, list[str]]:
    """Of each setting that has parts, the values that are among the cells and not among those that are shown."""
    left = {}
    for name in experiment.parts:
        found, all_there_are = (dict.fromkeys(str(cell[name]) for cell in each) for each in (shown, cells))
        if missing := [word for word in all_there_are if word not in found]:
            left[name] = missing
    return left


def _chosen(experiment: Experiment, cells: Mapping[str, Cell], only: Mapping[str, Collection[str]]) -> dict[str, Cell]:
    for name, words in only.items():
        if name not in experiment.parts:
            allowed = ", ".join(experiment.parts) or "none, it is run as a whole"
            raise RequestError(f"{experiment.name} has no parts by {name!r}; allowed: {allowed}.")
        there = dict.fromkeys(str(cell[name]) for cell in cells.values())
        for word in words:
            if word not in there:
                raise RequestError(f"{name}={word} is in no cell of this size; there are {', '.join(there)}.")
    found = {key: cell for key, cell in cells.items() if all(str(cell[name]) in words for name, words in only.items())}
    if not found:
        raise RequestError(f"no cell of {experiment.name} has {_words({n: ' or '.join(w) for n, w in only.items()})}.")
    return found


def _for_this_machine(experiment: Experiment, chosen: Mapping[str, Cell]) -> dict[str, Cell]:
    found = {key: cell for key, cell in chosen.items() if torch.cuda.is_available() or not experiment.needs_gpu(cell)}
    if not found:
        raise RequestError(f"all cells of {experiment.name} that were asked for need a GPU, and there is none here.")
    return found


def read_results(folder: Path) -> dict[str, Result]:
    """The finished cells of a folder, by key.

    Raises:
        RequestError: the file is damaged.
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
            raise RequestError(
                f"{path}, line {number}, is not a finished cell ({error}); delete the line to run it again."
            ) from error
    return found


def _line(key: str, result: Result) -> str:
    return json.dumps({"key": key, **asdict(result)}, ensure_ascii=False) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    """Write beside and rename: a run that is broken off leaves the old file or the new one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
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
