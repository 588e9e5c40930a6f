"""Formal languages at lengths beyond the training lengths: where a REM helps a Transformer, and where it cannot.

A string is read after a token for its beginning. At each step the network predicts which characters may come next and
whether the string may end; a string counts only if all steps are correct (Bhattamishra et al., 2020, On the Ability
and Limitations of Transformers to Recognize Formal Languages).

What to expect: a head with λ → −1 is a clock of period 2 that does not fade, which is all that (aa)* needs; a cyclical
pair with θ = ±π/2 is a clock of period 4, as for (abab)*. Parity flips with each 1, whenever it is read, and no sum
Σ λ^τ v with fixed rates does that. One head can count the 1s (λ → 1), but the layers after it must learn even and odd
counts one by one, up to those of the training strings.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from experiments.regular_languages.languages import LANGUAGES, make_splits
from experiments.regular_languages.networks import VARIANTS, accuracy, encode, make_network, train
from experiments.runner.comparison import Column, Comparison, all_measured, compare_variants, compared
from experiments.runner.experiment import Size, combinations
from experiments.runner.fit import default_device
from experiments.runner.summary import Conclusion, Rows, Run, Settings, Values, make_rows, weakest

SETTINGS: dict[Size, dict[str, int]] = {
    "toy": {"longest": 10, "train": 64, "test": 16, "steps": 150, "batch": 4, "width": 16, "layers": 1},
    "quick": {"longest": 50, "train": 1000, "test": 100, "steps": 300, "batch": 16, "width": 32, "layers": 1},
    "full": {"longest": 50, "train": 10_000, "test": 1000, "steps": 2000, "batch": 32, "width": 64, "layers": 2},
}
# Languages, variants and learning rates.
CHOSEN: dict[Size, tuple[tuple[str, ...], tuple[str, ...], tuple[float, ...]]] = {
    "toy": (("(aa)*", "parity"), ("rsa", "transformer"), (1e-2,)),
    "quick": (("parity", "(aa)*", "(abab)*", "d-2"), VARIANTS, (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)),
    "full": (tuple(LANGUAGES), VARIANTS, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)),
}


def length_bins(longest: int) -> tuple[tuple[int, int], ...]:
    """The training lengths, and two ranges beyond them."""
    return (2, longest), (longest + 1, 2 * longest), (2 * longest + 1, 3 * longest)


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Languages × variants × learning rates × seeds."""
    languages, variants, rates = CHOSEN[size]
    grid = combinations(language=languages, arm=variants, learning_rate=rates, seed=range(seeds))
    return [{**SETTINGS[size], **each} for each in grid]


def measure(settings: Settings) -> Values:
    """Train one network on one language. A seed has the same strings for all variants."""
    language, longest, seed = LANGUAGES[settings["language"]], settings["longest"], settings["seed"]
    bins = length_bins(longest)
    splits = make_splits(language, settings["train"], settings["test"], seed, bins)
    device = default_device()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_network(settings["arm"], len(language.alphabet), settings["width"], settings["layers"]).to(device)
    data = encode(language, splits.train).to(device)
    steps, loss = train(model, data, settings["steps"], settings["batch"], settings["learning_rate"], seed)
    correct = [accuracy(model, encode(language, strings).to(device)) for strings in splits.test]
    return {
        **{f"right {low}–{high}": share for (low, high), share in zip(bins, correct, strict=True)},
        "loss": loss,
        "steps": float(steps),
        "parameters": float(sum(p.numel() for p in model.parameters() if p.requires_grad)),
        "held out": float(splits.held_out),
    }


# --- results ------------------------------------------------------------------------------------------------------

ALL = "all"
LONGER = "right beyond the lengths trained on"
BY_LENGTH = [f"right {low}–{high}" for longest in (10, 50) for low, high in length_bins(longest)]
DIFFERENCE = f"{LONGER}, rsa − transformer"


def _accuracies(run: Run) -> dict[str, float]:
    """Accuracies by length, the training lengths first, and last their mean beyond those."""
    by_length = {name: run.values[name] for name in BY_LENGTH if name in run.values}
    return by_length | {LONGER: fmean([*by_length.values()][1:])}


def _over_transformer(name: str) -> Column:
    of_rsa = compared({"rsa"}, "transformer", lambda run, other: _accuracies(run)[name] - _accuracies(other)[name])
    return lambda case, arm: of_rsa(case, arm) if name in _accuracies(case.runs[arm][0]) else None


OVER_TRANSFORMER = {f"{name}, rsa − transformer": _over_transformer(name) for name in (*BY_LENGTH, LONGER)}
COMPARISON = Comparison(
    ("language",),
    ("rsa", "transformer"),
    # Learning rates are chosen by the accuracy at the training lengths, and where equal by the loss.
    lambda run: float(run.values["loss"] - 1e4 * next(iter(_accuracies(run).values()))),
    {
        **all_measured(*BY_LENGTH),
        LONGER: lambda case, arm: [_accuracies(run)[LONGER] for run in case.runs[arm]],
        **all_measured("loss", "steps", "parameters", "learning_rate"),
        **OVER_TRANSFORMER,
    },
    judged=(DIFFERENCE,),
    higher_is_better=True,
    listed=(*BY_LENGTH, LONGER),
    shown=LONGER,
    label="strings entirely right, beyond the lengths trained on",
)


def summarise(runs: Sequence[Run]) -> Rows:
    """Rows of each language; language "all" is the mean of RSA's differences over the languages."""
    rows, cases = COMPARISON.summarise(runs), COMPARISON.cases(runs)
    for name, column in OVER_TRANSFORMER.items():
        of_languages = [values for case in cases if (values := column(case, "rsa")) is not None]
        if of_languages:
            overall = [*map(fmean, zip(*of_languages, strict=True))]
            rows += make_rows({"language": ALL, "arm": "rsa"}, {name: overall})
    return rows


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if RSA is significantly better at longer strings, over all languages and on Parity."""
    claimed = Rows(row for row in rows if row.settings["language"] in (ALL, "parity"))
    found, gains = COMPARISON.conclude(claimed), claimed.find(DIFFERENCE)
    has_parity = len(gains) > 1
    return replace(
        found,
        verdict=found.verdict if has_parity else weakest(found.verdict, "not measurable at this size"),
        answer=f"{DIFFERENCE}: " + ", ".join(f"{row.settings['language']} {row.text('+.3f')}" for row in gains),
        findings=COMPARISON.conclude(rows).findings,
    )


EXPERIMENT = compare_variants(
    COMPARISON,
    name="regular-languages",
    claim="At lengths beyond the training lengths, RSA gets more strings entirely right than the same Transformer "
    "without it: over all languages together, and on Parity.",
    published="None at hand. The conventions are those of Bhattamishra et al. (2020, arXiv 2009.11264).",
    remark="The Transformer, with RSA and without, has no position encoding, so it has no maximum length and counts "
    "by its mask. A REM weights positions, independent of their content. It can track what depends on position alone "
    "at any length, as in (aa)* and (abab)*; the state of Parity, which each 1 flips, is not a weighted sum of the "
    "past. A variant that does not learn a language at the training lengths shows nothing about longer ones.",
    seeds={"toy": 2, "quick": 3, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    summarise=summarise,
    parts=("language", "arm"),
)
