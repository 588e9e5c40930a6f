"""Formal languages at lengths beyond those trained on: where a REM helps a Transformer, and where it cannot.

Every string is read after a token for its beginning. At each step the network says which characters may come next and
whether the string may end; a string counts only where all steps are right (Bhattamishra et al., 2020, On the Ability
and Limitations of Transformers to Recognize Formal Languages).

What is to be expected: a head with λ → −1 is a clock of period 2 that does not wear off, which is all that (aa)*
needs; a cyclical pair with θ = ±π/2 is one of period 4, as for (abab)*. Parity flips with each 1 that is read,
whenever that is: no sum Σ λ^τ v with fixed rates and values of single characters does that, since it adds up where it
would have to multiply. One head can count the 1s (λ → 1), but the layers behind it learn even and odd counts
one by one, up to those of the strings trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rsa_hf.experiments.regular_languages.arms import ARMS, CELLS, make_arm, rsa_plan
from rsa_hf.experiments.regular_languages.languages import LANGUAGES, make_splits
from rsa_hf.experiments.regular_languages.learning import accuracy, encode, learn
from rsa_hf.experiments.regular_languages.tables import conclude, in_bin, score, summarise
from rsa_hf.experiments.runner.cells import Cell, Result, Values
from rsa_hf.experiments.runner.experiment import Experiment, Meanings, Size
from rsa_hf.plots import panels

__all__ = ["EXPERIMENT"]

BINS = 3
# Quick and toy runs have one learning rate for all arms; full ones have the same search for each.
SETTINGS: dict[Size, dict[str, int]] = {
    "toy": {"longest": 10, "train": 64, "test": 16, "steps": 150, "batch": 4, "width": 16, "layers": 1},
    "quick": {"longest": 50, "train": 1000, "test": 100, "steps": 300, "batch": 16, "width": 32, "layers": 1},
    "full": {"longest": 50, "train": 10_000, "test": 1000, "steps": 5000, "batch": 32, "width": 64, "layers": 2},
}
CHOSEN: dict[Size, tuple[tuple[str, ...], tuple[str, ...], tuple[float, ...]]] = {
    "toy": (("(aa)*", "parity"), ("rsa", "transformer"), (1e-2,)),
    "quick": (("parity", "(aa)*", "(abab)*", "d-2"), ("rsa", "transformer", *CELLS), (1e-2,)),
    "full": (tuple(LANGUAGES), ARMS, (1e-3, 3e-3, 1e-2)),
}


def cells(size: Size, seeds: int) -> list[Cell]:
    """Languages × arms × learning rates × seeds."""
    languages, arms, rates = CHOSEN[size]
    return [
        {"language": language, "arm": arm, "learning_rate": rate, **SETTINGS[size], "seed": seed}
        for language in languages
        for arm in arms
        for rate in rates
        for seed in range(seeds)
    ]


def run_cell(cell: Cell) -> Values:
    """Train one network on one language. A seed has the same strings for all arms."""
    language, seed, longest = LANGUAGES[str(cell["language"])], int(cell["seed"]), int(cell["longest"])
    bins = tuple((max(2, number * longest + 1), (number + 1) * longest) for number in range(BINS))
    splits = make_splits(language, int(cell["train"]), int(cell["test"]), seed, bins)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_arm(str(cell["arm"]), len(language.alphabet), int(cell["width"]), int(cell["layers"])).to(device)
    data = encode(language, splits.train).to(device)
    steps, loss = learn(model, data, int(cell["steps"]), int(cell["batch"]), float(cell["learning_rate"]), seed)
    right = [accuracy(model, encode(language, strings).to(device)) for strings in splits.test]
    return {
        **{in_bin(*ends): share for ends, share in zip(bins, right, strict=True)},
        "loss": loss,
        "steps": float(steps),
        "parameters": float(sum(p.numel() for p in model.parameters() if p.requires_grad)),
        "held out": float(splits.held_out),
    }


def draw(results: Sequence[Result], path: Path) -> None:
    """A panel a language: the share of strings right in each bin, of each arm, with 95 % intervals."""
    rows = summarise(results)
    languages = list(dict.fromkeys(str(result.cell["language"]) for result in results))
    arms = list(dict.fromkeys(str(result.cell["arm"]) for result in results))
    measures = [name for name in results[0].values if name.startswith("right")]
    with panels(path, len(languages), columns=4, sharey=True) as grid:
        for axes, language in zip(grid, languages, strict=True):
            for number, arm in enumerate(arms):
                found = [
                    row
                    for measure in measures
                    for row in rows
                    if row.measure == measure and row.settings["language"] == language and row.settings["arm"] == arm
                ]
                middle = [100 * row.mean for row in found]
                ends = [[100 * (row.mean - row.low) for row in found], [100 * (row.high - row.mean) for row in found]]
                # Side by side: many arms have all strings right, or none.
                places = [place + 0.6 * ((number + 0.5) / len(arms) - 0.5) for place in range(len(found))]
                axes.errorbar(places, middle, yerr=ends, fmt="o", capsize=3, label=arm)
            axes.set_title(language)
            axes.set_xticks(range(len(measures)), [name.removeprefix("right ") for name in measures])
            axes.set_xlabel("length")
            axes.set_ylim(-5, 105)
        grid[0].set_ylabel("strings entirely right, %")
        grid[0].legend()


def meanings(cells: Sequence[Cell]) -> Meanings:
    """RSA's plan, the same in all arms that have one."""
    arms = dict.fromkeys(str(cell["arm"]) for cell in cells)
    return {"arm": {arm: rsa_plan().to_dict() for arm in arms if arm.startswith("rsa")}}


EXPERIMENT = Experiment(
    name="regular-languages",
    claim="At lengths beyond those trained on, RSA gets more strings entirely right than the same Transformer without "
    "it: over all languages together, and on Parity.",
    published="None at hand. The conventions are those of Bhattamishra et al. (2020, arXiv 2009.11264).",
    remark="The Transformer, with RSA and without, has no position encoding, so that its lengths have no end and it "
    "counts by its mask; the sinusoidal ones have that of Vaswani et al. (2017). A REM weighs positions whatever "
    "stands there. What depends on where alone, as in (aa)* and (abab)*, it can keep at any length; the state of "
    "Parity, which each 1 turns over, is no weighted sum of the past. But an arm that does not learn a language at "
    "the lengths trained on shows nothing about longer ones.",
    seeds={"toy": 2, "quick": 3, "full": 5},
    cells=cells,
    run_cell=run_cell,
    conclude=conclude,
    draw=draw,
    summarise=summarise,
    meanings=meanings,
    parts=("language", "arm"),
    search_by=score,
)
