"""Variants of a model compared: each at its best learning rate, and seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runner.panels import COLOURS, panels
from experiments.runner.summary import Rows, Run, Settings, make_rows, worst_if_nan


@dataclass(frozen=True)
class Case:
    """The variants of one model on one data set.

    Attributes:
        settings: the settings of the case.
        runs: by variant, the runs at its best learning rate, in the order of their seeds.
        rates: by variant, the learning rates that it was trained at.
    """

    settings: Settings
    runs: dict[str, list[Run]]
    rates: dict[str, list[float]]

    def values(self, arm: str, name: str) -> list[float]:
        """A measured value or a setting of a variant, by seed."""
        return [run.values[name] if name in run.values else run.settings[name] for run in self.runs[arm]]

    def numbers(self, arm: str) -> dict[str, list[float]]:
        """All measured numbers of a variant, and its learning rate."""
        names = [name for name, value in self.runs[arm][0].values.items() if not isinstance(value, list)]
        found = {name: self.values(arm, name) for name in names}
        return found | {"learning rate": self.values(arm, "learning_rate")}

    def compare(self, arm: str, other: str, compare: Callable[[Run, Run], float]) -> list[float]:
        """Compare two variants seed by seed."""
        return [compare(*pair) for pair in zip(self.runs[arm], self.runs[other], strict=True)]

    def differences(self, arm: str, other: str, name: str) -> list[float]:
        """A value of one variant minus that of the other; infinite where the first diverged."""
        return self.compare(arm, other, lambda run, against: worst_if_nan(run.values[name]) - against.values[name])

    def ratios(self, arm: str, other: str, name: str) -> list[float]:
        """A value of one variant over that of the other; infinite where the first diverged."""
        return self.compare(arm, other, lambda run, against: worst_if_nan(run.values[name]) / against.values[name])


@dataclass(frozen=True)
class Comparison:
    """How to summarise and draw an experiment that compares variants of a model.

    Its runs have the settings `arm` (the variant), `learning_rate` and `seed`.

    Attributes:
        group: the settings that make a case.
        needed: variants that a case needs; cases that lack one are left out.
        score: run → score, lower is better. The best learning rate has the lowest mean score over the seeds that have
            run at every rate.
        columns: (case, variant) → values by measure, one value per seed.
        shown: the measure that is drawn.
        label: what it is, with its unit.
        even: where the figure has a line, for instance at a difference of 0; None: it has none.
    """

    group: tuple[str, ...]
    needed: tuple[str, ...]
    score: Callable[[Run], float]
    columns: Callable[[Case, str], dict[str, list[float]]]
    shown: str = ""
    label: str = ""
    even: float | None = None

    def cases(self, runs: Sequence[Run]) -> list[Case]:
        """The complete cases, in the order of the runs."""
        found: dict[tuple[Any, ...], dict[str, dict[float, list[Run]]]] = {}
        for run in runs:
            arms = found.setdefault(tuple(run.settings[name] for name in self.group), {})
            arms.setdefault(run.settings["arm"], {}).setdefault(run.settings["learning_rate"], []).append(run)
        return [
            Case(
                dict(zip(self.group, group, strict=True)),
                {arm: self._best([*rates.values()]) for arm, rates in arms.items()},
                {arm: [*rates] for arm, rates in arms.items()},
            )
            for group, arms in found.items()
            if arms.keys() >= set(self.needed)
        ]

    def _best(self, by_rate: Sequence[list[Run]]) -> list[Run]:
        shared = set.intersection(*({run.settings["seed"] for run in runs} for runs in by_rate))

        def mean(runs: Iterable[Run]) -> float:
            return worst_if_nan(statistics.fmean(self.score(run) for run in runs if run.settings["seed"] in shared))

        return sorted(min(by_rate, key=mean), key=lambda run: run.settings["seed"])

    def summarise(self, runs: Sequence[Run]) -> Rows:
        """The rows of each variant of each case."""
        return Rows(
            row
            for case in self.cases(runs)
            for arm in case.runs
            for row in make_rows({**case.settings, "arm": arm}, self.columns(case, arm))
        )

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
                if self.even is not None:
                    axes.axvline(self.even, color="#666666", linewidth=0.8)
                names = [f"{name} {value}" for name, value in zip(self.group, case, strict=True)]
                title = "\n".join(", ".join(names[i : i + 2]) for i in range(0, len(names), 2))
                axes.set(title=title, xlabel=f"{self.label}\nmean and 95 % interval, {found[0].seeds} seeds")
