"""Runs, and their means over seeds with 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = [
    "Row",
    "Run",
    "Setting",
    "Settings",
    "Values",
    "at_best_rate",
    "error_bars",
    "find_rows",
    "interval",
    "make_rows",
    "paired",
    "scaled",
    "summarise",
    "with_interval",
    "worst_if_nan",
]

Setting = str | int | float | bool
# The settings of one run: variant, seed, sizes. Means are taken over "seed".
Settings = Mapping[str, Setting]
# Measured values by name; lists are for the figure.
Values = dict[str, float | list[float]]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        settings: its settings.
        values: the return value of `Experiment.measure`.
        seconds: wall time.
        machine: the processor or GPU.
        versions: versions of the packages that the values depend on.
    """

    settings: Settings
    values: Values
    seconds: float
    machine: str
    versions: Mapping[str, str]

    def number(self, name: str) -> float:
        """A value that is a single number.

        Raises:
            KeyError: there is no such value.
            TypeError: it is a list.
        """
        value = self.values[name]
        if isinstance(value, list):
            raise TypeError(f"{name} is a list of {len(value)} numbers.")
        return value


@dataclass(frozen=True)
class Row:
    """One measure of runs that differ in their seed alone.

    Attributes:
        settings: the settings they share.
        measure: name of the value.
        mean: mean over the seeds.
        low: lower end of the 95 % interval; NaN where there is no interval.
        high: upper end.
        seeds: number of seeds.
    """

    settings: Settings
    measure: str
    mean: float
    low: float
    high: float
    seeds: int


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval (Student's t).

    The ends are NaN for a single value, and where a value is not finite because a run diverged.

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
    # Not t.interval, which gives NaN where all values agree.
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def make_rows(settings: Settings, columns: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row for each column of values, one value a seed."""
    return [Row(settings, measure, *interval(values), len(values)) for measure, values in columns.items()]


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Rows for each group of runs that differ in their seed alone, in the order of the runs; lists are left out."""
    groups: dict[tuple[tuple[str, Setting], ...], list[Run]] = {}
    for run in runs:
        key = tuple((name, value) for name, value in run.settings.items() if name != "seed")
        groups.setdefault(key, []).append(run)
    rows = []
    for key, group in groups.items():
        columns: dict[str, list[float]] = {}
        for run in group:
            for name, value in run.values.items():
                if not isinstance(value, list):
                    columns.setdefault(name, []).append(value)
        rows += make_rows(dict(key), columns)
    return rows


def find_rows(rows: Sequence[Row], measure: str, **settings: Setting) -> list[Row]:
    """The rows of a measure that have these settings, in order."""
    return [
        row for row in rows if row.measure == measure and all(row.settings.get(k) == v for k, v in settings.items())
    ]


def scaled(row: Row, factor: float) -> Row:
    """The row of all values times a factor; negative factors turn the interval round."""
    low, high = (row.low, row.high) if factor > 0 else (row.high, row.low)
    return replace(row, mean=factor * row.mean, low=factor * low, high=factor * high)


def with_interval(row: Row, number_format: str) -> str:
    """Mean and interval as text, each in a format such as `+.3f`."""
    missing = "one seed" if row.seeds == 1 else "no interval"
    ends = missing if math.isnan(row.low) else f"{row.low:{number_format}} … {row.high:{number_format}}"
    return f"{row.mean:{number_format}} ({ends})"


def error_bars(rows: Sequence[Row], factor: float = 1) -> list[list[float]]:
    """The intervals as matplotlib's `errorbar` takes them."""
    return [[factor * (row.mean - row.low) for row in rows], [factor * (row.high - row.mean) for row in rows]]


def paired(runs: Sequence[Run], others: Sequence[Run], compare: Callable[[Run, Run], float]) -> list[float]:
    """Compare the runs of two variants seed by seed."""
    return [compare(run, other) for run, other in zip(runs, others, strict=True)]


def worst_if_nan(score: float) -> float:
    """A score of which lower is better, with NaN (a run that diverged) counted as infinite.

    Used to choose learning rates. In a comparison it is applied to the RSA run, so that divergence counts against
    RSA, unless the other run diverged too.
    """
    return math.inf if math.isnan(score) else score


def at_best_rate(
    runs: Sequence[Run], group: Sequence[str], variants: Collection[str], score: Callable[[Run], float]
) -> list[tuple[dict[str, Setting], dict[str, list[Run]]]]:
    """The runs of each variant at its best learning rate, in the order of their seeds.

    Args:
        runs: runs with the settings `arm` (the variant), `learning_rate` and `seed`.
        group: the settings within which variants are compared.
        variants: variants that a comparison needs; groups that lack one are left out.
        score: the best rate has the lowest mean score over the seeds that have run at every rate.

    Returns:
        The settings of each group, and its runs by variant.
    """
    found: dict[tuple[Setting, ...], dict[str, dict[float, list[Run]]]] = {}
    for run in runs:
        by_variant = found.setdefault(tuple(run.settings[name] for name in group), {})
        by_rate = by_variant.setdefault(str(run.settings["arm"]), {})
        by_rate.setdefault(float(run.settings["learning_rate"]), []).append(run)
    return [
        (dict(zip(group, key, strict=True)), {name: _best([*rates.values()], score) for name, rates in each.items()})
        for key, each in found.items()
        if each.keys() >= set(variants)
    ]


def _best(by_rate: Sequence[list[Run]], score: Callable[[Run], float]) -> list[Run]:
    shared = set.intersection(*({run.settings["seed"] for run in runs} for runs in by_rate))

    def mean(runs: Iterable[Run]) -> float:
        return worst_if_nan(statistics.fmean(score(run) for run in runs if run.settings["seed"] in shared))

    return sorted(min(by_rate, key=mean), key=lambda run: int(run.settings["seed"]))
