"""From results to rows: each arm at its own learning rate, gains over the plain model by seed, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from rsa_hf.config import RSAConfig
from rsa_hf.experiments.arms import DAMPED
from rsa_hf.experiments.fine_tune.arms import ARMS, DEFAULT, PLAIN
from rsa_hf.experiments.fine_tune.grid import COMPARISONS
from rsa_hf.experiments.runner.cells import Result, Setting
from rsa_hf.experiments.runner.conclusion import Conclusion, judge, undecided
from rsa_hf.experiments.runner.summary import Row, at_best_rate, find_rows, in_words, interval

__all__ = ["GAIN", "SETTING", "by_validation", "conclude", "summarise"]

SETTING = ("model", "task", "share")
GAIN = "gain"  # over the plain model: bits per byte fewer, or more functions right
OVER_DAMPED = f"gain over {DAMPED}"
OVER_DEFAULT = "gain over the default plan"
TRAINED_ON = "tokens trained on, at most"
GAIN_BEFORE = "gain before training"  # below 0: what putting RSA heads on costs
UNITS = {"accuracy": ("percentage points of accuracy", 100), "bits per byte": ("bits per byte", 1)}


def by_validation(result: Result) -> float:
    """What the learning rate of an arm is chosen by, the least being the best; never the test score."""
    return -_better(result, "validation")


def summarise(results: Sequence[Result]) -> list[Row]:
    """Rows of each model, task, share of the data and arm, at the arm's best learning rate."""
    rows = []
    for setting, best in at_best_rate(results, SETTING, (PLAIN, DEFAULT), by_validation):
        for arm, runs in best.items():
            settings = {**setting, "arm": arm}
            names = [name for name, value in runs[0].values.items() if not isinstance(value, list)]
            columns = {name: [run.number(name) for run in runs] for name in names}
            columns["learning rate"] = [float(run.cell["learning_rate"]) for run in runs]
            columns[TRAINED_ON] = [
                math.prod(int(run.cell[name]) for name in ("steps", "batch", "length")) for run in runs
            ]
            columns["seconds"] = [run.seconds for run in runs]
            if arm != PLAIN:
                score = _score_of(runs[0])
                columns[GAIN] = _gains(runs, best[PLAIN], score)
                columns[GAIN_BEFORE] = _gains(runs, best[PLAIN], "before training")
                if arm == DEFAULT and DAMPED in best:
                    columns[OVER_DAMPED] = _gains(runs, best[DAMPED], score)
                elif arm != DEFAULT:
                    columns[OVER_DEFAULT] = _gains(runs, best[DEFAULT], score)
            rows += [Row(settings, name, *interval(values), len(values)) for name, values in columns.items()]
    return rows


def _gains(runs: Sequence[Result], others: Sequence[Result], name: str) -> list[float]:
    return [_better(run, name) - _better(other, name) for run, other in zip(runs, others, strict=True)]


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed if the default plan gains beyond the interval in every case; not, if it gains nothing in one.

    A gain whose interval does not reach above 0 is none. It has to gain over its own gates with P of zeros too.
    """
    gains, by_recurrence = find_rows(rows, GAIN, arm=DEFAULT), find_rows(rows, OVER_DAMPED)
    gained, lost = sum(row.low > 0 for row in gains), sum(row.high < 0 for row in gains)
    sentence = (
        f"With RSAConfig()'s defaults ({DEFAULT}: start of μ, pace in multiples of the weights'), fine-tuning gains "
        "over the same model without RSA, beyond the interval, in "
        f"{gained} of {len(gains)} cases and loses in {lost}."
    )
    if by_recurrence:
        without = sum(row.low > 0 for row in by_recurrence)
        sentence += f" It gains over the same with P of zeros in {without} of {len(by_recurrence)}."
    tried = [_compared(rows, names) for names in (("gate_init",), ("parameter_scale",), ("nu_init", "theta_init"))]
    of_full = dict.fromkeys(each.model for each in COMPARISONS["full"])
    if not any(row.settings["model"] in of_full for row in rows):
        sentence += f" Part of --full alone: {', '.join(of_full)}."
    findings = []
    for row in gains:
        tokens = find_rows(rows, TRAINED_ON, **row.settings)[0].mean
        text = f"{_place(row)}, {tokens:,.0f} tokens: {_in_words(rows, row)}"
        for over in find_rows(rows, OVER_DAMPED, **row.settings):
            text += f"; {_in_words(rows, over)} over P of zeros"
        findings.append(text)
    findings += [text for texts in tried for text in texts]
    losses = [replace(row, mean=-row.mean, low=-row.high, high=-row.low) for row in [*gains, *by_recurrence]]
    return Conclusion(judge(losses, 0), sentence + undecided(losses, 0), tuple(findings))


def _compared(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Mean gains of arms that differ in some settings alone, over the cases that have all of them, task by task."""
    tried = {str(row.settings["arm"]) for row in rows}
    default = {name: getattr(RSAConfig(), name) for name in names}
    arms = [
        arm
        for arm, plan in ARMS.items()
        if arm in tried and arm != DAMPED and plan is not None and replace(plan, **default) == RSAConfig()
    ]
    cases: dict[tuple[Setting, Setting], list[list[Row]]] = {}
    for first in find_rows(rows, GAIN, arm=DEFAULT):
        setting = {name: first.settings[name] for name in SETTING}
        found = [row for arm in arms for row in find_rows(rows, GAIN, arm=arm, **setting)]
        if len(found) == len(arms) > 1:
            cases.setdefault((setting["model"], setting["task"]), []).append(found)
    texts = []
    for (model, task), found_in_each in cases.items():
        columns = dict(zip(arms, zip(*found_in_each, strict=True), strict=True))
        means = {arm: fmean(row.mean for row in column) for arm, column in columns.items()}
        before = {
            arm: fmean(find_rows(rows, GAIN_BEFORE, **row.settings)[0].mean for row in column)
            for arm, column in columns.items()
        }
        unit, factor = UNITS[_measure(rows, found_in_each[0][0])]
        listed = ", ".join(f"{arm}: {factor * means[arm]:+.3f} and {factor * before[arm]:+.3f}" for arm in arms)
        best = max(means, key=lambda arm: means[arm])
        n = len(found_in_each)
        text = f"on {model}, {task}, {best} gains most over {n} share{'s' if n > 1 else ''} of the data"
        if best != DEFAULT:
            over = [find_rows(rows, OVER_DEFAULT, **row.settings)[0] for row in columns[best]]
            text += f", more than the default beyond the interval in {sum(row.low > 0 for row in over)}"
        texts.append(f"{text} (mean gains after and before training, {unit}: {listed})")
    return texts


def _place(row: Row) -> str:
    return f"{row.settings['model']}, {row.settings['task']}, {100 * float(row.settings['share']):g} %"


def _in_words(rows: Sequence[Row], row: Row) -> str:
    unit, factor = UNITS[_measure(rows, row)]
    scaled = replace(row, mean=factor * row.mean, low=factor * row.low, high=factor * row.high)
    return f"{in_words(scaled, '+.3f')} {unit}"


def _measure(rows: Sequence[Row], row: Row) -> str:
    """The score of a row's task."""
    return next(measure for measure in UNITS if find_rows(rows, measure, **row.settings))


def _score_of(result: Result) -> str:
    return next(measure for measure in UNITS if measure in result.values)


def _better(result: Result, name: str) -> float:
    """A score, turned so that more is better."""
    return result.number(name) * (-1 if _score_of(result) == "bits per byte" else 1)
