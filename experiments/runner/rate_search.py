"""Search learning rates with the first seed; the other seeds run at the rate that was best for their variant.

The grid lists rates in geometric steps, more than are run. Every variant begins with the three in the middle, and goes
on by one while its best rate has a neighbour that has not run, so the best one has been tried from both sides unless
the grid ends there. Without a score to search by, every seed runs the whole grid. In all functions, `grid` holds the
settings of all runs and `finished` the finished runs, both by key; `score` maps a run to a number, lower is better, or
is None.
"""

from collections.abc import Callable, Mapping
from typing import Any

from experiments.runner.summary import Run, Settings, worst_if_nan

Grid = Mapping[str, Settings]
Score = Callable[[Run], float]
RATE, SEED = "learning_rate", "seed"
AT_FIRST = 3  # rates


def required_runs(grid: Grid, finished: Mapping[str, Run], score: Score | None) -> dict[str, Settings]:
    """The runs of the first seed that the search needs by now, and of the others at rates that are known."""
    if score is None:
        return dict(grid)
    first = min(settings[SEED] for settings in grid.values())
    rates: dict[Any, dict[str, float]] = {}
    for key, settings in grid.items():
        if settings[SEED] == first:
            rates.setdefault(_group(settings, score), {})[key] = settings[RATE]
    searches = {group: _search(found, finished, score) for group, found in rates.items()}
    required = {key for keys, _ in searches.values() for key in keys}
    return {
        key: settings
        for key, settings in grid.items()
        if key in required or (settings[SEED] != first and settings[RATE] == searches[_group(settings, score)][1])
    }


def number_of_runs(grid: Grid, finished: Mapping[str, Run], score: Score | None) -> int:
    """The number of runs when the search is done, if those that it needs by now are all."""
    needed = required_runs(grid, finished, score)
    if score is None:
        return len(needed)
    first = min(settings[SEED] for settings in grid.values())
    others = {(_group(settings, score), settings[SEED]) for settings in grid.values() if settings[SEED] != first}
    return len([key for key, settings in needed.items() if settings[SEED] == first]) + len(others)


def finished_runs(grid: Grid, finished: Mapping[str, Run], score: Score | None) -> list[Run]:
    """The runs of variants that are finished for every seed."""
    required = required_runs(grid, finished, score)
    unfinished = {_group(settings, score) for key, settings in required.items() if key not in finished}
    return [finished[key] for key, settings in required.items() if _group(settings, score) not in unfinished]


def _search(rates: Mapping[str, float], finished: Mapping[str, Run], score: Score) -> tuple[set[str], float | None]:
    """The keys that the search of one variant needs by now, and its best rate, None until all of them are finished."""
    keys = sorted(rates, key=rates.__getitem__)
    middle = max(0, (len(keys) - AT_FIRST) // 2)
    low, high = middle, min(middle + AT_FIRST, len(keys))
    while finished.keys() >= set(keys[low:high]):
        best = min(range(low, high), key=lambda place: worst_if_nan(score(finished[keys[place]])))
        if best == low > 0:
            low -= 1
        elif best == high - 1 < len(keys) - 1:
            high += 1
        else:
            return set(keys[low:high]), rates[keys[best]]
    return set(keys[low:high]), None


def _group(settings: Settings, score: Score | None) -> frozenset[tuple[str, Any]]:
    """The settings without the seed, and without the learning rate where it is searched."""
    left_out = (SEED,) if score is None else (RATE, SEED)
    return frozenset((name, value) for name, value in settings.items() if name not in left_out)
