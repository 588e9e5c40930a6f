"""Formal languages at lengths beyond the training lengths: where a REM helps a Transformer, and where it cannot.

A string is read after a token for its beginning. At each step the network predicts which characters may come next and
whether the string may end; a string counts only if all steps are correct (Bhattamishra et al., 2020, On the Ability
and Limitations of Transformers to Recognize Formal Languages).

What to expect: a head with λ → −1 is a clock of period 2 that does not fade, which is all that (aa)* needs; a cyclical
pair with θ = ±π/2 is a clock of period 4, as for (abab)*. Parity flips with each 1, whenever it is read: no sum
Σ λ^τ v with fixed rates and values of single characters computes that, because it would have to multiply rather than
add. One head can count the 1s (λ → 1), but the layers after it must learn even and odd counts one by one, up to
those of the training strings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch

from rsa_hf.experiments.regular_languages.languages import LANGUAGES, make_splits
from rsa_hf.experiments.regular_languages.networks import (
    CELLS,
    VARIANTS,
    accuracy,
    encode,
    make_network,
    rsa_plan,
    train,
)
from rsa_hf.experiments.runner.conclusion import Conclusion, judge, undecided, weakest
from rsa_hf.experiments.runner.experiment import Experiment, Glossary, Size
from rsa_hf.experiments.runner.fit import default_device
from rsa_hf.experiments.runner.summary import (
    Row,
    Run,
    Settings,
    Values,
    at_best_rate,
    error_bars,
    find_rows,
    make_rows,
    paired,
    scaled,
)
from rsa_hf.plots import panels

__all__ = ["EXPERIMENT"]

BINS = 3
SETTINGS: dict[Size, dict[str, int]] = {
    "toy": {"longest": 10, "train": 64, "test": 16, "steps": 150, "batch": 4, "width": 16, "layers": 1},
    "quick": {"longest": 50, "train": 1000, "test": 100, "steps": 300, "batch": 16, "width": 32, "layers": 1},
    "full": {"longest": 50, "train": 10_000, "test": 1000, "steps": 5000, "batch": 32, "width": 64, "layers": 2},
}
# Languages, variants and learning rates. Toy and quick runs have one learning rate for all variants.
CHOSEN: dict[Size, tuple[tuple[str, ...], tuple[str, ...], tuple[float, ...]]] = {
    "toy": (("(aa)*", "parity"), ("rsa", "transformer"), (1e-2,)),
    "quick": (("parity", "(aa)*", "(abab)*", "d-2"), ("rsa", "transformer", *CELLS), (1e-2,)),
    "full": (tuple(LANGUAGES), VARIANTS, (1e-3, 3e-3, 1e-2)),
}
ALL = "all"
PAIRS = (("rsa", "transformer"), ("rsa-sinusoidal", "transformer-sinusoidal"))
DIFFERENCE = "rsa − transformer"
LONGER = "right beyond the lengths trained on"


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Languages × variants × learning rates × seeds."""
    languages, variants, rates = CHOSEN[size]
    return [
        {"language": language, "arm": variant, "learning_rate": rate, **SETTINGS[size], "seed": seed}
        for language in languages
        for variant in variants
        for rate in rates
        for seed in range(seeds)
    ]


def measure(settings: Settings) -> Values:
    """Train one network on one language. A seed has the same strings for all variants."""
    language, variant, seed = LANGUAGES[str(settings["language"])], str(settings["arm"]), int(settings["seed"])
    longest, width, layers = (int(settings[name]) for name in ("longest", "width", "layers"))
    bins = tuple((max(2, number * longest + 1), (number + 1) * longest) for number in range(BINS))
    splits = make_splits(language, int(settings["train"]), int(settings["test"]), seed, bins)
    device = default_device()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_network(variant, len(language.alphabet), width, layers).to(device)
    steps, loss = train(
        model,
        encode(language, splits.train).to(device),
        int(settings["steps"]),
        int(settings["batch"]),
        float(settings["learning_rate"]),
        seed,
    )
    correct = [accuracy(model, encode(language, strings).to(device)) for strings in splits.test]
    return {
        **{f"right {low}–{high}": share for (low, high), share in zip(bins, correct, strict=True)},
        "loss": loss,
        "steps": float(steps),
        "parameters": float(sum(p.numel() for p in model.parameters() if p.requires_grad)),
        "held out": float(splits.held_out),
    }


def _bins(run: Run) -> list[str]:
    """Names of the accuracies by length, the training lengths first."""
    return [name for name in run.values if name.startswith("right")]


def _value(run: Run, name: str) -> float:
    return fmean(map(run.number, _bins(run)[1:])) if name == LONGER else run.number(name)


def by_training_lengths(run: Run) -> float:
    """The score that learning rates are chosen by, lower being better; never the accuracy at longer lengths.

    The accuracy at the training lengths, and with equal accuracy the training loss: one string of a thousand outweighs
    any difference of losses.
    """
    return run.number("loss") - 1e4 * run.number(_bins(run)[0])


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Rows of each language and variant at its best learning rate; then RSA minus the Transformer, seed by seed.

    Language "all" is the mean over the languages that both have run on.
    """
    rows, found = [], at_best_rate(runs, ("language",), PAIRS[0], by_training_lengths)
    accuracies = [*_bins(runs[0]), LONGER] if runs else []
    for group, best in found:
        for variant, each in best.items():
            settings = {**group, "arm": variant, "learning_rate": each[0].settings["learning_rate"]}
            columns = [*accuracies, "loss", "steps", "parameters"]
            rows += make_rows(settings, {name: [_value(run, name) for run in each] for name in columns})
    for rsa, plain in PAIRS:
        both = {str(group["language"]): best for group, best in found if best.keys() >= {rsa, plain}}
        for name in accuracies if both else ():
            differences = {language: _differences(best[rsa], best[plain], name) for language, best in both.items()}
            differences[ALL] = [fmean(seed) for seed in zip(*differences.values(), strict=True)]
            for language, values in differences.items():
                rows += make_rows({"language": language, "arm": f"{rsa} − {plain}"}, {name: values})
    return rows


def _differences(runs: Sequence[Run], others: Sequence[Run], name: str) -> list[float]:
    return paired(runs, others, lambda run, other: _value(run, name) - _value(other, name))


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed if RSA is significantly better at longer strings, over all languages and on Parity."""
    [overall] = find_rows(rows, LONGER, language=ALL, arm=DIFFERENCE)
    if math.isnan(overall.low):
        return Conclusion("not measurable at this size", "There is one seed, which gives no interval.")
    parity = find_rows(rows, LONGER, language="parity", arm=DIFFERENCE)
    each = [row for row in find_rows(rows, LONGER, arm=DIFFERENCE) if row.settings["language"] != ALL]
    significant, better_on_parity = not overall.low <= 0 <= overall.high, bool(parity) and parity[0].low > 0
    sentence = (
        f"Beyond the training lengths, RSA gets {100 * overall.mean:+.1f} percentage points "
        f"({100 * overall.low:+.1f} … {100 * overall.high:+.1f}) more strings entirely right than the same "
        f"Transformer, as the mean of {len(each)} languages, which is {'' if significant else 'not '}significant; "
        + (f"on Parity it is {'' if better_on_parity else 'not '}better." if parity else "Parity has not been run.")
    )
    losses = [scaled(row, -1) for row in (overall, *parity)]
    verdict = judge(losses, 0)
    if not parity:
        verdict = weakest(verdict, "not measurable at this size")
    findings = tuple(_finding(rows, str(row.settings["language"])) for row in each)
    return Conclusion(verdict, sentence + undecided(losses, 0), findings)


def _finding(rows: Sequence[Row], language: str) -> str:
    """Accuracy of each variant at the training lengths, without which the rest means nothing, and beyond."""
    trained = next(row.measure for row in rows if row.measure.startswith("right"))
    variants = [
        f"{row.settings['arm']} {100 * row.mean:.1f} and "
        f"{100 * find_rows(rows, LONGER, language=language, arm=row.settings['arm'])[0].mean:.1f}"
        for row in find_rows(rows, trained, language=language)
        if "−" not in str(row.settings["arm"])
    ]
    return f"{language}, % entirely right at the training lengths and beyond: {', '.join(variants)}"


def draw(runs: Sequence[Run], path: Path) -> None:
    """A panel for each language: accuracy by length and variant, with 95 % intervals."""
    rows, bins = summarise(runs), _bins(runs[0])
    languages, variants = (
        list(dict.fromkeys(str(run.settings[name]) for run in runs)) for name in ("language", "arm")
    )
    with panels(path, len(languages), columns=4, sharey=True) as grid:
        for axes, language in zip(grid, languages, strict=True):
            for number, variant in enumerate(variants):
                found = [row for name in bins for row in find_rows(rows, name, language=language, arm=variant)]
                # Side by side, since many variants have all strings right, or none.
                places = [place + 0.6 * ((number + 0.5) / len(variants) - 0.5) for place in range(len(found))]
                means, errors = [100 * row.mean for row in found], error_bars(found, 100)
                axes.errorbar(places, means, yerr=errors, fmt="o", capsize=3, label=variant)
            axes.set_title(language)
            axes.set_xticks(range(len(bins)), [name.removeprefix("right ") for name in bins])
            axes.set_xlabel("length")
            axes.set_ylim(-5, 105)
        grid[0].set_ylabel("strings entirely right, %")
        grid[0].legend()


def glossary(grid: Sequence[Settings]) -> Glossary:
    """The head plan, the same in all variants with RSA."""
    variants = dict.fromkeys(str(settings["arm"]) for settings in grid)
    return {"arm": {variant: rsa_plan().to_dict() for variant in variants if variant.startswith("rsa")}}


EXPERIMENT = Experiment(
    name="regular-languages",
    claim="At lengths beyond the training lengths, RSA gets more strings entirely right than the same Transformer "
    "without it: over all languages together, and on Parity.",
    published="None at hand. The conventions are those of Bhattamishra et al. (2020, arXiv 2009.11264).",
    remark="The Transformer, with RSA and without, has no position encoding, so it has no maximum length and counts "
    "by its mask; the sinusoidal variants have that of Vaswani et al. (2017). A REM weights positions, independent of "
    "their content. It can track what depends on position alone at any length, as in (aa)* and (abab)*; the state of "
    "Parity, which each 1 flips, is not a weighted sum of the past. A variant that does not learn a language at the "
    "training lengths shows nothing about longer ones.",
    seeds={"toy": 2, "quick": 3, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=draw,
    summarise=summarise,
    glossary=glossary,
    parts=("language", "arm"),
    search_by=by_training_lengths,
)
