"""Run an experiment. Each finished run is stored at once, so that an interrupted experiment continues where it was.

The folder `results/reproduce/NAME/SIZE` holds cells.jsonl, one line per finished run; table.md, means with intervals;
figure.png; conclusion.json, the verdict; configuration.json, all settings and the machine.
"""

import json
import math
from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.runner.experiment import EXPERIMENTS, SIZES, Experiment, RequestError, Size, find_experiment
from experiments.runner.processes import run_all
from experiments.runner.rate_search import finished_runs, number_of_runs, required_runs
from experiments.runner.summary import Conclusion, Rows, Run, Settings

FOLDER = Path("results") / "reproduce"
RUNS = "cells.jsonl"
CONFIGURATION = "configuration.json"
CONCLUSION = "conclusion.json"

Grid = dict[str, Settings]


def run_experiment(
    experiment: Experiment,
    size: Size,
    root: Path,
    seeds: int | None = None,
    only: Mapping[str, Collection[str]] | None = None,
    progress: bool = True,
    executor: Executor | None = None,
) -> Conclusion:
    """Run what has not run yet, then write table, figure, conclusion and configuration.

    These cover all runs of this size that are finished for every seed, from this call or an earlier one, on this
    machine or another. `only` has the allowed values of some settings.

    Raises:
        MissingDataError: data is missing.
        ImportError: a package is missing.
        RequestError: `only` matches no run, there is nothing to compare yet, or a stored file cannot be read.
    """
    seeds = seeds or experiment.seeds[size]
    folder = root / FOLDER / experiment.name / size
    folder.mkdir(parents=True, exist_ok=True)
    grid = _select(experiment, experiment.keyed_grid(size, seeds), only or {})
    score, finished = experiment.search_by, read_runs(folder)
    done = len(required_runs(grid, finished, score).keys() & finished.keys())
    with tqdm(initial=done, desc=experiment.name, disable=not progress) as bar:
        # The search of learning rates determines which runs remain, so ask again after each round.
        while left := {k: each for k, each in required_runs(grid, finished, score).items() if k not in finished}:
            bar.total = number_of_runs(grid, finished, score)
            for key, run in run_all(experiment.measure, left, executor):
                finished[key] = run
                record = asdict(run)
                record = {"key": key, "cell": record.pop("settings"), **record}
                with (folder / RUNS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                bar.set_postfix(run.settings, refresh=False)
                bar.update()
    # Read again: another process may have run another part.
    conclusion, runs = _write_results(experiment, size, folder, seeds, read_runs(folder))
    if experiment.draw is not None:
        experiment.draw(runs, folder / "figure.png")
    return conclusion


def rebuild_results(root: Path) -> None:
    """Write tables, conclusions and configurations again from the stored runs, without running anything.

    Folders without runs of the experiment's present revision stay as they are. Figures are not drawn again.
    """
    for name in EXPERIMENTS:
        for size in SIZES:
            folder = root / FOLDER / name / size
            if not (folder / CONFIGURATION).exists():
                continue
            experiment, finished = find_experiment(name), read_runs(folder)
            seeds = json.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))["seeds"]
            if experiment.keyed_grid(size, seeds).keys() & finished.keys():
                _write_results(experiment, size, folder, seeds, finished)


def _select(experiment: Experiment, grid: Grid, only: Mapping[str, Collection[str]]) -> Grid:
    """The part of a grid that `only` asks for."""
    for name, wanted in only.items():
        if name not in experiment.parts:
            allowed = ", ".join(experiment.parts) or "none, it runs as a whole"
            raise RequestError(f"{experiment.name} cannot be split by {name!r}; allowed: {allowed}.")
        existing = dict.fromkeys(str(settings[name]) for settings in grid.values())
        if unknown := set(wanted) - set(existing):
            raise RequestError(f"{name}={', '.join(unknown)} is in no run of this size; choose from {[*existing]}.")
    selected = {k: each for k, each in grid.items() if all(str(each[n]) in wanted for n, wanted in only.items())}
    if not selected:
        raise RequestError(f"{experiment.name}: no run has all of these settings.")
    return selected


def _write_results(
    experiment: Experiment, size: Size, folder: Path, seeds: int, finished: Mapping[str, Run]
) -> tuple[Conclusion, list[Run]]:
    """Write everything but the figure; returns the conclusion and the runs that it covers."""
    grid, score = experiment.keyed_grid(size, seeds), experiment.search_by
    runs = finished_runs(grid, finished, score)
    rows = experiment.summarise(runs)
    if not rows:
        raise RequestError(f"{folder}: the finished runs make no comparison yet; run the other variants too.")
    conclusion = experiment.conclude(rows)
    command = f"python -m experiments {experiment.name} --{size}"
    if seeds != experiment.seeds[size]:
        command += f" --seeds {seeds}"
    configuration = {
        "experiment": experiment.name,
        "claim": experiment.claim,
        "published": experiment.published,
        "size": size,
        "seeds": seeds,
        "revision": experiment.revision,
        "command": command,
        "seconds": round(sum(run.seconds for run in runs), 1),
        "machines": sorted({run.machine for run in runs}),
        # More than one where an experiment was continued after an upgrade.
        "versions": [dict(each) for each in dict.fromkeys(tuple(run.versions.items()) for run in runs)],
        "cells": [run.settings for run in runs],
        "planned": number_of_runs(grid, finished, score),
        "rates_at_an_edge": experiment.edges(runs) if experiment.edges else None,
    }
    (folder / "table.md").write_text(_markdown(rows), encoding="utf-8")
    write_json(folder / CONCLUSION, asdict(conclusion))
    write_json(folder / CONFIGURATION, configuration)
    return conclusion, runs


def read_runs(folder: Path) -> dict[str, Run]:
    """The finished runs of a folder, by key; a RequestError if the file is damaged."""
    path = folder / RUNS
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            key, settings = record.pop("key"), record.pop("cell")
            found[key] = Run(settings, **record)
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{path}, line {number}, is not a finished run ({error}). Delete the line to run it again."
            ) from error
    return found


def write_json(path: Path, value: Any) -> None:
    """Write a value as a results file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _markdown(rows: Rows) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    lines = [
        f"| {' | '.join([*names, 'measure', 'mean', '95 % interval', 'seeds'])} |",
        "|---" * (len(names) + 4) + "|",
    ]
    for row in rows:
        ends = "" if math.isnan(row.low) else f"{row.low:.4g} … {row.high:.4g}"
        settings = [str(row.settings.get(name, "")) for name in names]
        lines.append(f"| {' | '.join([*settings, row.measure, f'{row.mean:.4g}', ends, str(row.seeds)])} |")
    return "\n".join(lines) + "\n"
