"""Runs, their means over seeds with 95 % intervals, and the verdict that follows from intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from scipy.stats import t

Settings = Mapping[str, Any]  # of one run: variant, seed, sizes
Values = dict[str, Any]  # measured numbers by name; lists of numbers are for the figure
Verdict = Literal["not confirmed", "not measurable at this size", "confirmed"]


@dataclass(frozen=True)
class Run:
    """A finished run: its settings and what it measured; its wall time, processor or GPU, and versions of packages."""

    settings: Settings
    values: Values
    seconds: float
    machine: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One measure of runs that differ in their seed alone."""

    settings: Settings  # those that the runs share
    measure: str
    mean: float  # over the seeds
    low: float  # the lower end of the 95 % interval; NaN if there is none
    high: float
    seeds: int

    def scaled(self, factor: float) -> Row:
        """The row of all values times a factor; negative factors turn the interval round."""
        low, high = (self.low, self.high) if factor > 0 else (self.high, self.low)
        return replace(self, mean=factor * self.mean, low=factor * low, high=factor * high)

    def pick(self, names: Sequence[str]) -> dict[str, Any]:
        """Some of the settings."""
        return {name: self.settings[name] for name in names}

    def text(self, number_format: str) -> str:
        """Mean and interval, each in a format such as `+.3f`."""
        ends = f"{self.low:{number_format}} … {self.high:{number_format}}"
        if math.isnan(self.low):
            ends = "one seed" if self.seeds == 1 else "no interval"
        return f"{self.mean:{number_format}} ({ends})"


class Rows(list[Row]):
    """Rows of a table. Less is better in comparisons; `even` is their value where RSA changes nothing."""

    def find(self, measure: str, **settings: Any) -> Rows:
        """The rows of a measure that have these settings."""
        return Rows(row for row in self if row.measure == measure and settings.items() <= row.settings.items())

    def mean(self, measure: str, **settings: Any) -> float:
        """The mean of the first of these rows."""
        return self.find(measure, **settings)[0].mean

    def by(self, setting: str) -> dict[Any, Rows]:
        """The rows by the value of a setting."""
        values = dict.fromkeys(row.settings[setting] for row in self)
        return {value: Rows(row for row in self if row.settings[setting] == value) for value in values}

    def counts(self) -> tuple[int, int]:
        """In how many runs a measure of 0 or 1 was 1, and the number of runs."""
        return round(sum(row.mean * row.seeds for row in self)), sum(row.seeds for row in self)

    def negated(self) -> Rows:
        """The rows with the opposite sign: of gains, where more is better, losses."""
        return Rows(row.scaled(-1) for row in self)

    def span(self, number_format: str) -> str:
        """The smallest and the largest mean, such as `0.18 to 0.46`."""
        ends = min(row.mean for row in self), max(row.mean for row in self)
        return " to ".join(dict.fromkeys(f"{end:{number_format}}" for end in ends))

    def spans(self, setting: str, number_format: str) -> str:
        """The span for each value of a setting, such as `gpt2 0.18 to 0.46, llama 0.54`."""
        return ", ".join(f"{value} {rows.span(number_format)}" for value, rows in self.by(setting).items())

    def below(self, even: float) -> int:
        """The number of rows that are significantly better."""
        return sum(row.high < even for row in self)

    def wins(self, even: float) -> str:
        """The same, such as `3 of 4`."""
        return f"{self.below(even)} of {len(self)}"

    def judge(self, even: float) -> Verdict:
        """The verdict on the comparisons in these rows.

        Confirmed if every interval lies below `even`; not confirmed if an interval lies at or above it; not measurable
        otherwise, where chance may have decided. A single seed has no interval: it cannot confirm a claim, but it can
        fail it. The same holds for an infinite mean, of a run with RSA that diverged.
        """
        if any((row.mean if math.isnan(row.low) else row.low) >= even for row in self):
            return "not confirmed"
        return "confirmed" if self.below(even) == len(self) else "not measurable at this size"

    def undecided(self, even: float) -> str:
        """A sentence on the comparisons that chance may have decided; empty if there are none."""
        # An infinite mean has no interval either, but it decides against the claim.
        count = sum(not math.isinf(row.mean) and (math.isnan(row.low) or row.low < even <= row.high) for row in self)
        if not count:
            return ""
        return (
            f" {count} of {len(self)} comparisons are undecided (the interval contains {even:g}, or there is only one "
            "seed): they need more seeds or longer training."
        )

    def error_bars(self) -> list[list[float]]:
        """The intervals as matplotlib's `errorbar` takes them."""
        return [[row.mean - row.low for row in self], [row.high - row.mean for row in self]]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval (Student's t).

    The ends are NaN for a single value, and where a value is not finite because a run diverged.
    """
    mean = statistics.fmean(values)
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return mean, math.nan, math.nan
    # Not t.interval, which gives NaN where all values agree.
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def make_rows(settings: Settings, columns: Mapping[str, Sequence[float]]) -> Rows:
    """A row for each column of values, one value per seed."""
    return Rows(Row(settings, measure, *interval(values), len(values)) for measure, values in columns.items())


def summarise(runs: Sequence[Run]) -> Rows:
    """Rows for each group of runs that differ in their seed alone, in the order of the runs; lists are left out."""
    groups: dict[frozenset[tuple[str, Any]], list[Run]] = {}
    for run in runs:
        groups.setdefault(frozenset(run.settings.items() - {("seed", run.settings["seed"])}), []).append(run)
    rows = Rows()
    for group in groups.values():
        columns: dict[str, list[float]] = {}
        for run in group:
            for name, value in run.values.items():
                if not isinstance(value, list):
                    columns.setdefault(name, []).append(value)
        rows += make_rows({name: value for name, value in group[0].settings.items() if name != "seed"}, columns)
    return rows


def worst_if_nan(score: float) -> float:
    """A score of which lower is better, with NaN (a run that diverged) counted as infinite.

    Used to choose learning rates. In a comparison it is applied to the RSA run, so that divergence counts against
    RSA, unless the other run diverged too.
    """
    return math.inf if math.isnan(score) else score


@dataclass(frozen=True)
class Conclusion:
    """What the rows say about the claim."""

    verdict: Verdict
    answer: str  # in a few words, for the table at the top of RESULTS.md
    sentence: str
    findings: tuple[str, ...] = ()  # the comparisons that it follows from

    def __str__(self) -> str:
        return "\n".join([f"{self.verdict}: {self.sentence}", *(f"  {each}" for each in self.findings)])


def weakest(*verdicts: Verdict) -> Verdict:
    """The verdict on a claim whose parts must all hold."""
    return min(verdicts, key=get_args(Verdict).index)
