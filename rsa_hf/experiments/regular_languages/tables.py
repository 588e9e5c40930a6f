"""From results to rows: each arm at its own learning rate, differences between arms seed by seed, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from rsa_hf.experiments.runner.cells import Result
from rsa_hf.experiments.runner.conclusion import Conclusion, judge, undecided, weakest
from rsa_hf.experiments.runner.summary import Row, at_best_rate, find_rows, interval

__all__ = ["conclude", "in_bin", "score", "summarise"]

ALL = "all"
PAIRS = (("rsa", "transformer"), ("rsa-sinusoidal", "transformer-sinusoidal"))
DIFFERENCE = "rsa − transformer"
LONGER = "right beyond the lengths trained on"


def in_bin(low: int, high: int) -> str:
    """The name of the share of strings that are right, of these lengths."""
    return f"right {low}–{high}"


def score(result: Result) -> float:
    """What the learning rate of an arm is chosen by, the least being the best: never the longer bins.

    The share of strings right at the lengths trained on decides, and where that is the same the training loss: of a
    thousand strings a single one outweighs any difference of losses.
    """
    return result.number("loss") - 1e4 * result.number(_bins([result])[0])


def summarise(results: Sequence[Result]) -> list[Row]:
    """Rows of each language and arm, at its best learning rate; then RSA minus the Transformer, paired by seed.

    Language "all" is the mean over the languages that both have run.
    """
    rows = []
    found = at_best_rate(results, ("language",), PAIRS[0], score)
    for group, arms in found:
        for arm, runs in arms.items():
            settings = {**group, "arm": arm, "learning_rate": runs[0].cell["learning_rate"]}
            for measure in [*_measures(results), "loss", "steps", "parameters"]:
                values = [_value(result, measure) for result in runs]
                rows.append(Row(settings, measure, *interval(values), len(values)))
    for rsa, plain in PAIRS:
        both = {str(group["language"]): arms for group, arms in found if arms.keys() >= {rsa, plain}}
        if not both:
            continue
        for measure in _measures(results):
            differences = {
                language: [
                    _value(of_rsa, measure) - _value(of_plain, measure)
                    for of_rsa, of_plain in zip(arms[rsa], arms[plain], strict=True)
                ]
                for language, arms in both.items()
            }
            differences[ALL] = [fmean(column) for column in zip(*differences.values(), strict=True)]
            for name, values in differences.items():
                settings = {"language": name, "arm": f"{rsa} − {plain}"}
                rows.append(Row(settings, measure, *interval(values), len(values)))
    return rows


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed if RSA is better at longer strings, beyond chance, over all languages and on Parity."""
    [overall] = find_rows(rows, LONGER, language=ALL, arm=DIFFERENCE)
    if math.isnan(overall.low):
        return Conclusion("not measurable at this size", "There is one seed, which gives no interval.")
    parity = find_rows(rows, LONGER, language="parity", arm=DIFFERENCE)
    each = [row for row in find_rows(rows, LONGER, arm=DIFFERENCE) if row.settings["language"] != ALL]
    beyond_chance, better_on_parity = not overall.low <= 0 <= overall.high, bool(parity) and parity[0].low > 0
    sentence = (
        f"Beyond the lengths trained on, RSA gets {100 * overall.mean:+.1f} percentage points "
        f"({100 * overall.low:+.1f} … {100 * overall.high:+.1f}) more strings entirely right than the same "
        f"Transformer, as the mean of {len(each)} languages, which is {'' if beyond_chance else 'not '}beyond chance; "
        + (f"on Parity it is {'' if better_on_parity else 'not '}better." if parity else "Parity has not been run.")
    )
    findings = [_of_language(rows, str(row.settings["language"])) for row in each]
    losses = [replace(row, mean=-row.mean, low=-row.high, high=-row.low) for row in (overall, *parity)]
    verdict = judge(losses, 0)
    if not parity:
        verdict = weakest(verdict, "not measurable at this size")
    return Conclusion(verdict, sentence + undecided(losses, 0), tuple(findings))


def _of_language(rows: Sequence[Row], language: str) -> str:
    """What each arm gets right at the lengths trained on, without which the rest says nothing, and beyond."""
    trained = next(row.measure for row in rows if row.measure.startswith("right"))
    arms = [
        f"{row.settings['arm']} {100 * row.mean:.1f} and "
        f"{100 * find_rows(rows, LONGER, language=language, arm=row.settings['arm'])[0].mean:.1f}"
        for row in find_rows(rows, trained, language=language)
        if "−" not in str(row.settings["arm"])
    ]
    return f"{language}, % entirely right at the lengths trained on and beyond: {', '.join(arms)}"


def _bins(results: Sequence[Result]) -> list[str]:
    """The names of the shares in each bin, the bin with the lengths trained on first."""
    return [name for name in results[0].values if name.startswith("right")]


def _measures(results: Sequence[Result]) -> list[str]:
    return [*_bins(results), LONGER]


def _value(result: Result, measure: str) -> float:
    if measure == LONGER:
        return fmean(_value(result, name) for name in _bins([result])[1:])
    value = result.values[measure]
    assert isinstance(value, int | float)
    return value
