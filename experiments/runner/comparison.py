"""Variants of a model compared: each at its best learning rate, and seed by seed."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runner.experiment import Experiment
from experiments.runner.panels import COLOURS, panels
from experiments.runner.summary import Conclusion, Row, Rows, Run, Settings, make_rows, worst_if_nan


@dataclass(frozen=True)
class Case:
    """The variants of one model on one data set."""

    settings: Settings
    runs: dict[str, list[Run]]  # by variant, at its best learning rate, in the order of their seeds
    rates: dict[str, list[float]]  # by variant, the learning rates that it was trained at, if one had to be chosen

    def rows(self, arm: str, columns: Mapping[str, "Column"], **settings: Any) -> Rows:
        """The rows of a variant, with more settings."""
        found = {name: column(self, arm) for name, column in columns.items()}
        there = {name: values for name, values in found.items() if values is not None}
        return make_rows({**self.settings, "arm": arm, **settings}, there)


# (case, variant) → a value for each seed, or one for each part of a text; None: the variant has no such column.
Column = Callable[[Case, str], list[float] | list[list[float]] | None]


def measured(name: str) -> Column:
    """A measured value or a setting, where there is one, or the `seconds` of a run."""

    def column(case: Case, arm: str) -> list[float] | None:
        found = [{"seconds": run.seconds, **run.settings, **run.values} for run in case.runs[arm]]
        return [each[name] for each in found] if name in found[0] else None

    return column


def all_measured(*names: str) -> dict[str, Column]:
    """A column for each of these names, with blanks for underscores."""
    return {name.replace("_", " "): measured(name) for name in names}


def compared(arms: Collection[str], rival: str, compare: Callable[[Run, Run], Any]) -> Column:
    """Runs of some variants compared with those of a rival, seed by seed."""

    def column(case: Case, arm: str) -> list[Any] | None:
        if arm not in arms or rival not in case.runs:
            return None
        return [compare(*pair) for pair in zip(case.runs[arm], case.runs[rival], strict=True)]

    return column


def difference(arms: Collection[str], rival: str, name: str, *, higher_is_better: bool = False) -> Column:
    """A value of some variants minus that of a rival; infinite where one of them alone diverged."""
    sign = -1 if higher_is_better else 1

    def compare(run: Run, other: Run) -> float:
        return sign * (worst_if_nan(sign * run.values[name]) - worst_if_nan(sign * other.values[name]))

    return compared(arms, rival, compare)


def difference_by_part(arms: Collection[str], rival: str, name: str) -> Column:
    """The same of a value that is a list: of the parts of a test text."""

    def compare(run: Run, other: Run) -> list[float]:
        pairs = zip(run.values[name], other.values[name], strict=True)
        return [worst_if_nan(a) - worst_if_nan(b) for a, b in pairs]

    return compared(arms, rival, compare)


def ratio(arms: Collection[str], rival: str, name: str) -> Column:
    """A value of some variants over that of a rival; infinite where a variant diverged; None where both always did."""
    of_runs = compared(arms, rival, lambda run, other: worst_if_nan(run.values[name]) / other.values[name])

    def column(case: Case, arm: str) -> Any:
        ratios: Any = of_runs(case, arm)
        return None if ratios is None or all(map(math.isnan, ratios)) else ratios

    return column


@dataclass(frozen=True)
class Comparison:
    """How to summarise and draw an experiment that compares variants of a model.

    Its runs have the settings `arm` (the variant), `learning_rate` and `seed`.
    """

    group: tuple[str, ...]  # the settings that make a case
    needed: tuple[str, ...]  # cases that lack one of these variants are left out
    # Lower is better. The best rate has the lowest mean over seeds that ran at every rate; of equal ones, most seeds.
    score: Callable[[Run], float]
    columns: Mapping[str, Column]
    judged: tuple[str, ...] = ()  # the columns in which every row must be better than `even` for the claim to hold
    of_arm: str | None = None  # the variant whose rows they are; None: of all
    higher_is_better: bool = False  # in those columns
    even: float = 0
    listed: tuple[str, ...] = ()  # further columns to report beside them
    shown: str = ""  # the column that is drawn
    label: str = ""  # what it is, with its unit
    line: float | None = None  # where the figure has a line, for instance at a difference of 0

    def cases(self, runs: Sequence[Run]) -> list[Case]:
        """The complete cases, in the order of the runs."""
        found: dict[tuple[Any, ...], dict[str, dict[float, list[Run]]]] = {}
        for run in runs:
            arms = found.setdefault(tuple(run.settings[name] for name in self.group), {})
            arms.setdefault(run.settings["arm"], {}).setdefault(run.settings["learning_rate"], []).append(run)
        return [
            Case(
                dict(zip(self.group, group, strict=True)),
                {arm: self._best(sorted(rates.values(), key=len, reverse=True)) for arm, rates in arms.items()},
                {arm: [*rates] for arm, rates in arms.items() if self._is_choice(rates)},
            )
            for group, arms in found.items()
            if arms.keys() >= set(self.needed)
        ]

    def _best(self, by_rate: Sequence[list[Run]]) -> list[Run]:
        shared = set.intersection(*({run.settings["seed"] for run in runs} for runs in by_rate))

        def mean(runs: Iterable[Run]) -> float:
            return worst_if_nan(statistics.fmean(self.score(run) for run in runs if run.settings["seed"] in shared))

        return sorted(min(by_rate, key=mean), key=lambda run: run.settings["seed"])

    def _is_choice(self, rates: Mapping[float, list[Run]]) -> bool:
        """Whether a learning rate was chosen: not if nothing was trained, or if all rates score the same."""
        return max(rates) > 0 and (len(rates) == 1 or len({self.score(runs[0]) for runs in rates.values()}) > 1)

    def edges(self, runs: Sequence[Run]) -> tuple[int, int]:
        """How many of the best learning rates are the lowest or the highest tried, and how many were chosen."""
        found = [
            case.runs[arm][0].settings["learning_rate"] in (min(rates), max(rates))
            for case in self.cases(runs)
            for arm, rates in case.rates.items()
        ]
        return sum(found), len(found)

    def summarise(self, runs: Sequence[Run]) -> Rows:
        """The rows of each variant of each case."""
        return Rows(row for case in self.cases(runs) for arm in case.runs for row in case.rows(arm, self.columns))

    def conclude(self, rows: Rows) -> Conclusion:
        """Confirmed if each row that is judged is significantly better."""
        arms = (self.of_arm,) if self.of_arm else rows.by("arm")
        compared = Rows(row for name in self.judged for row in rows.find(name) if row.settings["arm"] in arms)
        losses, even = (compared.negated(), -self.even) if self.higher_is_better else (compared, self.even)
        sentence = f"significantly better in {losses.wins(even)} comparisons, worse in {losses.negated().below(-even)}"
        spans = (f"{name} {some.span(_format(some[0]))}" for name in self.judged if (some := compared.find(name)))
        lines: dict[str, list[str]] = {}
        for row in rows:
            if row.measure in (*self.listed, *self.judged):
                words = (v if isinstance(v, str) else f"{name} {v}" for name, v in row.settings.items())
                lines.setdefault(", ".join(words), []).append(f"{row.measure} {row.text(_format(row))}")
        findings = tuple(f"{settings}: {', '.join(texts)}" for settings, texts in lines.items())
        return Conclusion(losses.judge(even), "; ".join(spans), f"{sentence}.{losses.undecided(even)}", findings)

    def draw(self, runs: Sequence[Run], path: Path) -> None:
        """A panel for each case: the measure `shown` of each variant, with its 95 % interval."""
        rows = self.summarise(runs).find(self.shown)
        cases = list(dict.fromkeys(tuple(row.settings[name] for name in self.group) for row in rows))
        with panels(path, len(cases)) as grid:
            for axes, case in zip(grid, cases, strict=True):
                found = rows.find(self.shown, **dict(zip(self.group, case, strict=True)))
                # From the top down; infinite means are left out.
                places, means = range(len(found)), [row.mean for row in found]
                axes.errorbar(means, places, xerr=found.error_bars(), fmt="o", capsize=3, color=COLOURS[0])
                axes.set_yticks(places, [row.settings["arm"] for row in found])
                axes.set_ylim(len(found) - 0.5, -0.5)
                if self.line is not None:
                    axes.axvline(self.line, color="#666666", linewidth=0.8)
                names = [f"{name} {value}" for name, value in zip(self.group, case, strict=True)]
                title = "\n".join(", ".join(names[i : i + 2]) for i in range(0, len(names), 2))
                axes.set(title=title, xlabel=f"{self.label}\nmean and 95 % interval, {found[0].seeds} seeds")


def _format(row: Row) -> str:
    """Three decimals, of counts none; differences have a sign."""
    is_difference = " − " in row.measure or "gain" in row.measure
    is_count = row.mean >= 100 or (row.low == row.high and row.mean.is_integer())
    return "+.3f" if is_difference else ",.0f" if is_count else ".3f"


def compare_variants(comparison: Comparison, **fields: Any) -> Experiment:
    """An experiment whose summary, conclusion, figure and search of rates are those of a comparison, unless given."""
    own = {"summarise": comparison.summarise, "conclude": comparison.conclude, "draw": comparison.draw}
    return Experiment(**{**own, "search_by": comparison.score, "edges": comparison.edges, **fields})
