"""Runs, their means over seeds with 95 % intervals, and the verdict that follows from intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from scipy.stats import t

Settings = Mapping[str, Any]  # of one run: variant, seed, sizes
Values = dict[str, Any]  # measured numbers by name; lists of numbers are for the figure
LEVEL = 0.05  # of tests; intervals have 95 %
Verdict = Literal["not confirmed", "not measurable at this size", "chosen", "confirmed"]


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

    def scaled(self, factor: float) -> "Row":
        """The row of all values times a factor; negative factors turn the interval round."""
        low, high = (self.low, self.high) if factor > 0 else (self.high, self.low)
        return replace(self, mean=factor * self.mean, low=factor * low, high=factor * high)

    def pick(self, names: Sequence[str]) -> dict[str, Any]:
        """Some of the settings."""
        return {name: self.settings[name] for name in names}

    def p_value(self, even: float) -> float:
        """Student's t, two-sided, of the mean against `even`; NaN without an interval."""
        half = (self.high - self.low) / 2
        if half == 0:
            return float(self.mean == even)
        return float(2 * t.sf(abs(self.mean - even) / half * t.ppf(1 - LEVEL / 2, self.seeds - 1), self.seeds - 1))

    def text(self, number_format: str) -> str:
        """Mean and interval, each in a format such as `+.3f`; the mean alone where all values agree."""
        if self.low == self.high:
            return f"{self.mean:{number_format}}"
        ends = f"{self.low:{number_format}} … {self.high:{number_format}}"
        if math.isnan(self.low):
            ends = "one seed" if self.seeds == 1 else "no interval"
        return f"{self.mean:{number_format}} ({ends})"


class Rows(list[Row]):
    """Rows of a table. Less is better in comparisons; `even` is their value where RSA changes nothing."""

    def find(self, measure: str, **settings: Any) -> "Rows":
        """The rows of a measure that have these settings."""
        return Rows(row for row in self if row.measure == measure and settings.items() <= row.settings.items())

    def mean(self, measure: str, **settings: Any) -> float:
        """The mean of the first of these rows."""
        return self.find(measure, **settings)[0].mean

    def by(self, setting: str) -> dict[Any, "Rows"]:
        """The rows by the value of a setting."""
        values = dict.fromkeys(row.settings[setting] for row in self)
        return {value: Rows(row for row in self if row.settings[setting] == value) for value in values}

    def negated(self) -> "Rows":
        """The rows with the opposite sign: of gains, where more is better, losses."""
        return Rows(row.scaled(-1) for row in self)

    def span(self, number_format: str) -> str:
        """The smallest and the largest mean, such as `0.18 to 0.46`."""
        ends = min(row.mean for row in self), max(row.mean for row in self)
        return " to ".join(dict.fromkeys(f"{end:{number_format}}" for end in ends))

    def significant(self, even: float) -> list[bool]:
        """Which rows differ from `even` at 5 % over all of them, by Holm's procedure; a single seed never does."""
        p = [row.p_value(even) for row in self]
        order = sorted((i for i in range(len(p)) if not math.isnan(p[i])), key=p.__getitem__)
        holds = [p[i] <= LEVEL / (len(p) - rank) for rank, i in enumerate(order)]
        found = order[: holds.index(False) if False in holds else None]
        return [i in found for i in range(len(p))]

    def below(self, even: float) -> int:
        """The number of rows that are significantly better."""
        return sum(row.mean < even for row, differs in zip(self, self.significant(even), strict=True) if differs)

    def wins(self, even: float) -> str:
        """The same, such as `3 of 4`."""
        return f"{self.below(even)} of {len(self)}"

    def judge(self, even: float) -> Verdict:
        """The verdict on the comparisons in these rows.

        Confirmed if every row is significantly below `even`; not confirmed if one is significantly not; not measurable
        otherwise, where chance may have decided. A single seed has no interval: it cannot confirm a claim, but it can
        fail it. The same holds for an infinite mean, of a run with RSA that diverged, and where all seeds are even.
        """
        decided = zip(self, self.significant(even), strict=True)
        if any(row.mean >= even and (differs or not row.low < row.high) for row, differs in decided):
            return "not confirmed"
        return "confirmed" if self.below(even) == len(self) else "not measurable at this size"

    def undecided(self, even: float) -> str:
        """A sentence on the comparisons that chance may have decided; empty if there are none."""
        # An infinite mean has no interval either, but it decides against the claim, as equal values do.
        decided = zip(self, self.significant(even), strict=True)
        count = sum(not (differs or math.isinf(row.mean) or row.low == row.high) for row, differs in decided)
        if not count:
            return ""
        return f" {count} of {len(self)} comparisons are undecided: they need more seeds or longer training."

    def error_bars(self) -> list[list[float]]:
        """The intervals as matplotlib's `errorbar` takes them."""
        return [[row.mean - row.low for row in self], [row.high - row.mean for row in self]]


def interval(values: Sequence[float] | Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean and 95 % interval (Student's t) of the values of seeds.

    A value may itself be a sequence: of parts of a test text. The interval is then one over other seeds and other
    texts: the squares of both half widths are added. The ends are NaN for a single seed, and where a value is not
    finite because a run diverged.
    """
    matrix = [list(value) if isinstance(value, Sequence) else [value] for value in values]
    of_seeds, of_parts = ([statistics.fmean(each) for each in table] for table in (matrix, zip(*matrix, strict=True)))
    mean = statistics.fmean(of_seeds)
    if len(of_seeds) == 1 or not all(map(math.isfinite, of_seeds)):
        return mean, math.nan, math.nan
    half = math.hypot(_half_width(of_seeds), _half_width(of_parts) if len(of_parts) > 1 else 0)
    return mean, mean - half, mean + half


def _half_width(values: Sequence[float]) -> float:
    # Not t.interval, which gives NaN where all values agree.
    return float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def make_rows(settings: Settings, columns: Mapping[str, Sequence[float] | Sequence[Sequence[float]]]) -> Rows:
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

    Used to choose learning rates, and in comparisons: what diverges alone is worse, which counts against RSA but not
    for it, since an infinite mean has no interval.
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
