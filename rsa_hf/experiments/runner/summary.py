"""Means over seeds with 95 % intervals of Student's t, and rows of a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rsa_hf.experiments.runner.cells import Result, Setting

__all__ = ["Row", "at_best_rate", "find_rows", "in_words", "interval", "rated", "summarise"]


@dataclass(frozen=True)
class Row:
    """One measure of one group of cells that differ in their seed alone.

    Attributes:
        settings: what the cells of the group have in common.
        measure: the name of the value.
        mean: over the seeds.
        low: the lower end of the 95 % interval; NaN where there is none, see `interval`.
        high: the upper end.
        seeds: how many there are.
    """

    settings: Mapping[str, Setting]
    measure: str
    mean: float
    low: float
    high: float
    seeds: int


def in_words(row: Row, digits: str) -> str:
    """Its mean with the interval behind it, each written with this format, such as `+.3f`."""
    none = "one seed" if row.seeds == 1 else "no interval"
    ends = none if math.isnan(row.low) else f"{row.low:{digits}} … {row.high:{digits}}"
    return f"{row.mean:{digits}} ({ends})"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the two ends of the 95 % interval of Student's t.

    The ends are NaN of a single value, and where a value is not finite, as of a run that diverged.

    Raises:
        ImportError: scipy is not installed.
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("there are no values to take the mean of.")
    mean = statistics.fmean(values)
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return mean, math.nan, math.nan
    try:
        from scipy.stats import t
    except ImportError as error:
        raise ImportError("intervals need scipy: pip install 'rsa_hf[reproduce]'") from error
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def summarise(results: Sequence[Result]) -> list[Row]:
    """A row for each measure and each group of cells that differ in `seed` alone, in the order of the cells.

    Lists among the values are for the figure and make no row.
    """
    groups: dict[tuple[tuple[str, Setting], ...], list[Result]] = {}
    for result in results:
        key = tuple((name, value) for name, value in result.cell.items() if name != "seed")
        groups.setdefault(key, []).append(result)
    rows = []
    for key, group in groups.items():
        for measure in dict.fromkeys(name for result in group for name in result.values):
            found = [value for result in group if isinstance(value := result.values.get(measure), int | float)]
            if found:
                rows.append(Row(dict(key), measure, *interval(found), len(found)))
    return rows


def find_rows(rows: Sequence[Row], measure: str, **settings: Setting) -> list[Row]:
    """The rows of a measure that have these settings, in order."""
    return [
        row for row in rows if row.measure == measure and all(row.settings.get(k) == v for k, v in settings.items())
    ]


def rated(score: float) -> float:
    """A score of which less is better: NaN, of a run that diverged, is the worst there is.

    To choose a rate by it; and of RSA in a comparison, which then is against RSA unless the other run diverged too.
    """
    return math.inf if math.isnan(score) else score


def at_best_rate(
    results: Sequence[Result], group: Sequence[str], arms: Collection[str], score: Callable[[Result], float]
) -> list[tuple[dict[str, Setting], dict[str, list[Result]]]]:
    """The runs of each arm at its best learning rate, in the order of their seeds, for each group of settings.

    Args:
        results: cells with an `arm`, a `learning_rate` and a `seed`.
        group: the names of the settings within which arms are compared.
        arms: those without which there is no comparison; groups that lack one are left out.
        score: the rate with the least mean of it is the best, over the seeds that have run at every rate.

    Returns:
        The settings of each group, and its arms.
    """
    found: dict[tuple[Setting, ...], dict[str, dict[float, list[Result]]]] = {}
    for result in results:
        by_arm = found.setdefault(tuple(result.cell[name] for name in group), {})
        by_rate = by_arm.setdefault(str(result.cell["arm"]), {})
        by_rate.setdefault(float(result.cell["learning_rate"]), []).append(result)
    return [
        (dict(zip(group, key, strict=True)), {arm: _best([*runs.values()], score) for arm, runs in by_arm.items()})
        for key, by_arm in found.items()
        if by_arm.keys() >= set(arms)
    ]


def _best(by_rate: Sequence[list[Result]], score: Callable[[Result], float]) -> list[Result]:
    shared = set.intersection(*({run.cell["seed"] for run in runs} for runs in by_rate))

    def mean(runs: list[Result]) -> float:
        return statistics.fmean(score(run) for run in runs if run.cell["seed"] in shared)

    best = min(by_rate, key=lambda runs: rated(mean(runs)))
    return sorted(best, key=lambda run: int(run.cell["seed"]))
