"""From results to rows: each arm at its own learning rate, ratios seed by seed, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rsa_hf.experiments.arms import DAMPED
from rsa_hf.experiments.forecasting.arms import ARMS
from rsa_hf.experiments.forecasting.settings import PUBLISHED
from rsa_hf.experiments.runner.cells import Result, Setting
from rsa_hf.experiments.runner.conclusion import Conclusion, judge, undecided
from rsa_hf.experiments.runner.summary import Row, at_best_rate, find_rows, in_words, interval, rated

__all__ = ["RATIO", "by_validation", "conclude", "summarise"]

GROUP = ("series", "horizon", "family")
RATIO, FROM_DAMPED = "rsa / plain", f"rsa / {DAMPED}"
MEASURES = ("mse", "mae", "validation mse", "parameters")


def by_validation(result: Result) -> float:
    """What the learning rate of an arm is chosen by: the error on the validation part, never that on the test part."""
    return result.number("validation mse")


def summarise(results: Sequence[Result]) -> list[Row]:
    """Errors of each arm at its best learning rate, then RSA's over the plain model's, paired by seed.

    Beside them the published errors, which have no intervals, and those of the last period come again.
    """
    rows = []
    for group, arms in at_best_rate(results, GROUP, ARMS, by_validation):
        for arm, runs in arms.items():
            settings = {**group, "arm": arm, "learning_rate": runs[0].cell["learning_rate"]}
            rows += [_row(settings, measure, [run.number(measure) for run in runs]) for measure in MEASURES]
            published = PUBLISHED.get(tuple(group.values()), {}).get(arm)
            if published is not None:
                rows.append(Row({**group, "arm": arm}, "published mse", published, math.nan, math.nan, 0))
        for name, other in ((RATIO, "plain"), (FROM_DAMPED, DAMPED)):
            for measure in ("mse", "mae"):
                pairs = zip(arms["rsa"], arms[other], strict=True)
                ratios = [rated(rsa.number(measure)) / of_other.number(measure) for rsa, of_other in pairs]
                rows.append(_row({**group, "arm": name}, measure, ratios))
        naive = {**group, "family": "last period again", "arm": "none"}
        if not find_rows(rows, "mse", **naive):
            shown = arms["plain"][0]
            rows += [_row(naive, measure, [shown.number(f"naive {measure}")]) for measure in ("mse", "mae")]
    return rows


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed if RSA's error is lower in every family, series and horizon, beyond the interval."""
    ratios = find_rows(rows, "mse", arm=RATIO)
    findings = []
    for row in ratios:
        same = {name: row.settings[name] for name in GROUP}
        plain, rsa = (find_rows(rows, "mse", arm=arm, **same)[0].mean for arm in ("plain", "rsa"))
        [from_damped] = find_rows(rows, "mse", arm=FROM_DAMPED, **same)
        text = (
            f"{same['family']}, {same['series']}, {same['horizon']} steps: MSE {rsa:.3f} with RSA, {plain:.3f} without"
        )
        text += f", ratio {in_words(row, '.2f')}, and {in_words(from_damped, '.2f')} to P of zeros"
        published = {arm: find_rows(rows, "published mse", arm=arm, **same) for arm in ("plain", "rsa")}
        if published["rsa"] and published["plain"]:
            of_rsa, of_plain = published["rsa"][0].mean, published["plain"][0].mean
            text += f", published {of_rsa:.3f} and {of_plain:.3f}, ratio {of_rsa / of_plain:.2f}"
        findings.append(text)
    for row in find_rows(rows, "mse", arm="none"):
        findings.append(
            f"that the last period comes again has MSE {row.mean:.3f} on {row.settings['series']}, "
            f"{row.settings['horizon']} steps"
        )
    by_recurrence = find_rows(rows, "mse", arm=FROM_DAMPED)
    sentence = (
        f"RSA is better beyond the interval in {sum(row.high < 1 for row in ratios)} of {len(ratios)} comparisons, "
        f"and better than with P of zeros in {sum(row.high < 1 for row in by_recurrence)}."
    )
    compared = [*ratios, *by_recurrence]
    return Conclusion(judge(compared, 1), sentence + undecided(compared, 1), tuple(findings))


def _row(settings: dict[str, Setting], measure: str, values: Sequence[float]) -> Row:
    return Row(settings, measure, *interval(values), len(values))
