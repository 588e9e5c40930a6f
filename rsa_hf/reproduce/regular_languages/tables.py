"""From results to rows: each arm at its own learning rate, differences between arms seed by seed, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from rsa_hf.reproduce.cells import Result
from rsa_hf.reproduce.conclusion import Conclusion
from rsa_hf.reproduce.summary import Row, find_rows, interval

__all__ = ["conclude", "in_bin", "summarise"]

ALL = "all"
PAIRS = (("rsa", "transformer"), ("rsa-sinusoidal", "transformer-sinusoidal"))
DIFFERENCE = "rsa − transformer"
LONGER = "right beyond the lengths trained on"


def in_bin(low: int, high: int) -> str:
    """The name of the share of strings that are right, of these lengths."""
    return f"right {low}–{high}"


def summarise(results: Sequence[Result]) -> list[Row]:
    """Rows of each language and arm, at its best learning rate; then RSA minus the Transformer, paired by seed.

    The learning rate is chosen by the first bin, which has the lengths trained on, and by the training loss where that
    is the same: never by the longer bins. Language "all" is the mean over the languages.
    """
    groups = dict[tuple[str, str], list[Result]]()
    for result in results:
        groups.setdefault((str(result.cell["language"]), str(result.cell["arm"])), []).append(result)
    found = {key: _best_rate(group) for key, group in groups.items()}
    rows = []
    for (language, arm), by_seed in found.items():
        rate = next(iter(by_seed.values())).cell["learning_rate"]
        settings = {"language": language, "arm": arm, "learning_rate": rate}
        for measure in [*_measures(results), "loss", "steps", "parameters"]:
            values = [_value(result, measure) for result in by_seed.values()]
            rows.append(Row(settings, measure, *interval(values), len(values)))
    languages = list(dict.fromkeys(language for language, _ in found))
    for rsa, plain in PAIRS:
        if not all((language, arm) in found for language in languages for arm in (rsa, plain)):
            continue
        seeds = found[languages[0], rsa]
        for measure in _measures(results):
            differences = {
                language: [
                    _value(found[language, rsa][seed], measure) - _value(found[language, plain][seed], measure)
                    for seed in seeds
                ]
                for language in languages
            }
            differences[ALL] = [fmean(column) for column in zip(*differences.values(), strict=True)]
            for language, values in differences.items():
                settings = {"language": language, "arm": f"{rsa} − {plain}"}
                rows.append(Row(settings, measure, *interval(values), len(values)))
    return rows


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed if RSA is better at longer strings, beyond chance, over all languages and on Parity."""
    [overall] = find_rows(rows, LONGER, language=ALL, arm=DIFFERENCE)
    [parity] = find_rows(rows, LONGER, language="parity", arm=DIFFERENCE)
    if math.isnan(overall.low):
        return Conclusion("not measurable at this size", "There is one seed, which gives no interval.")
    each = [row for row in find_rows(rows, LONGER, arm=DIFFERENCE) if row.settings["language"] != ALL]
    arms = [
        f"{row.settings['arm']} {_percent(row.mean)}"
        for row in find_rows(rows, LONGER, language="parity")
        if "−" not in str(row.settings["arm"])
    ]
    better, better_on_parity = overall.low > 0, parity.low > 0
    sentence = (
        f"Beyond the lengths trained on, RSA gets {100 * overall.mean:+.1f} percentage points "
        f"({100 * overall.low:+.1f} … {100 * overall.high:+.1f}) more strings entirely right than the same "
        f"Transformer, as the mean of {len(each)} languages, which is {'' if better else 'not '}beyond chance; on "
        f"Parity it is {'' if better_on_parity else 'not '}better."
    )
    findings = (
        "percentage points more, by language: "
        + ", ".join(f"{row.settings['language']} {100 * row.mean:+.1f}" for row in each),
        f"entirely right on Parity: {', '.join(arms)}",
    )
    return Conclusion("confirmed" if better and better_on_parity else "not confirmed", sentence, findings)


def _best_rate(results: Sequence[Result]) -> dict[int, Result]:
    """The results of the best learning rate, by seed."""
    by_rate = dict[float, list[Result]]()
    for result in results:
        by_rate.setdefault(float(result.cell["learning_rate"]), []).append(result)
    first = _bins(results)[0]

    def score(rate: float) -> tuple[float, float]:
        share, loss = (fmean(_value(result, measure) for result in by_rate[rate]) for measure in (first, "loss"))
        return share, -loss

    return {int(result.cell["seed"]): result for result in by_rate[max(by_rate, key=score)]}


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


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
