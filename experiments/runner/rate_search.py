"""Search learning rates with the first seed; the other seeds run at the rate that was best for their variant.

Every variant tries the same rates. With r rates and n seeds this takes r + n − 1 runs per variant instead of r · n.
Without a score to search by, every seed runs the whole grid. In all functions, `grid` holds the settings of all runs
and `finished` the finished runs, both by key; `score` maps a run to a number, lower is better, or is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.runner.summary import Run, Settings, worst_if_nan

Grid = Mapping[str, Settings]
Score = Callable[[Run], float]
RATE, SEED = "learning_rate", "seed"


def required_runs(grid: Grid, finished: Mapping[str, Run], score: Score | None) -> dict[str, Settings]:
    """All runs of the first seed, and those of the other seeds whose learning rate is known by now."""
    if score is None:
        return dict(grid)
    first = min(settings[SEED] for settings in grid.values())
    searched: dict[Any, dict[str, float]] = {}
    for key, settings in grid.items():
        if settings[SEED] == first:
            searched.setdefault(_group(settings, score), {})[key] = settings[RATE]
    best = {
        group: rates[min(rates, key=lambda key: worst_if_nan(score(finished[key])))]
        for group, rates in searched.items()
        if rates.keys() <= finished.keys()
    }
    return {
        key: settings
        for key, settings in grid.items()
        if settings[SEED] == first or settings[RATE] == best.get(_group(settings, score))
    }


def number_of_runs(grid: Grid, score: Score | None) -> int:
    """The number of runs when the search is done."""
    first = min(settings[SEED] for settings in grid.values())
    return len({(_group(s, score), s[SEED], s[RATE] if score and s[SEED] == first else 0) for s in grid.values()})


def finished_runs(grid: Grid, finished: Mapping[str, Run], score: Score | None) -> list[Run]:
    """The runs of variants that are finished for every seed."""
    required = required_runs(grid, finished, score)
    unfinished = {_group(settings, score) for key, settings in required.items() if key not in finished}
    return [finished[key] for key, settings in required.items() if _group(settings, score) not in unfinished]


def _group(settings: Settings, score: Score | None) -> frozenset[tuple[str, Any]]:
    """The settings without the seed, and without the learning rate where it is searched."""
    left_out = (SEED,) if score is None else (RATE, SEED)
    return frozenset((name, value) for name, value in settings.items() if name not in left_out)
