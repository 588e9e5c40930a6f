"""Language modelling: Transformer-XL and the Block-Recurrent Transformer with and without RSA heads.

Memory is carried along the text, in training as in scoring. All arms are trained at every learning rate with the
first seed; the rate of an arm is the one with the fewest bits per character on the validation text, and the other
seeds are trained at it. What is reported is the test text. Where the text is bytes (enwik8), a character is a byte.

The published models have 14 layers and saw 4.5 billion characters of the whole data sets. Here is a prefix of enwik8
of 4.15 MB, and text8 made of it; so figures of theirs and ours differ in the text too, and only the differences that
RSA makes can be set beside one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rsa_hf.experiments.arms import DAMPED
from rsa_hf.experiments.runner.cells import Cell, Result, Values
from rsa_hf.experiments.runner.conclusion import Conclusion, judge, undecided
from rsa_hf.experiments.runner.experiment import Experiment, Meanings, Size
from rsa_hf.experiments.runner.step_time import step_time_ratio
from rsa_hf.experiments.runner.summary import Row, at_best_rate, find_rows, in_words, interval, rated
from rsa_hf.experiments.segment_models import (
    ARCHITECTURES,
    ARMS,
    SHAPES,
    build,
    read_segments,
    rsa_plan,
    train_on_segments,
)
from rsa_hf.plots import COLOURS, panels
from rsa_hf.tasks.language_modeling import evaluate_language_model

__all__ = ["EXPERIMENT"]

GROUP = ("corpus", "architecture", "model", "steps")
FROM_PLAIN, FROM_DAMPED = "rsa − plain", f"rsa − {DAMPED}"
TIME = "time of a step / plain"
PUBLISHED_SIZE = "14 layers"
# Bits per character without and with RSA heads.
PUBLISHED = {
    ("enwik8", "block-recurrent"): (1.0746, 1.0683),
    ("text8", "block-recurrent"): (1.1652, 1.1625),
}


def cells(size: Size, seeds: int) -> list[Cell]:
    """Every arm at every learning rate; the published sizes are for a GPU."""
    eval_bytes = 4_000 if size == "toy" else 12_000 if size == "quick" else 100_000
    grid: list[tuple[str, str, int, tuple[float, ...]]]
    if size == "toy":
        grid = [("python", "small", 60, (1e-2,))]
    elif size == "quick":
        grid = [("text8", "small", 150, (5e-3, 1e-2))]
    else:
        grid = [(corpus, "small", 2000, (1e-3, 3e-3, 1e-2)) for corpus in ("enwik8", "text8")]
        grid += [(corpus, PUBLISHED_SIZE, 3000, (1e-4, 2.5e-4, 5e-4)) for corpus in ("enwik8", "text8")]
    return [
        {
            "corpus": corpus,
            "architecture": architecture,
            "model": model,
            "steps": steps,
            "eval_bytes": eval_bytes,
            "arm": arm,
            "learning_rate": rate,
            "seed": seed,
        }
        for corpus, model, steps, rates in grid
        for seed in range(seeds)
        for architecture in ARCHITECTURES
        for arm in ARMS
        for rate in rates
    ]


def run_cell(cell: Cell) -> Values:
    """Bits per character on the validation and the test text, after training."""
    shape, corpus = SHAPES[str(cell["model"])], str(cell["corpus"])
    text = read_segments(corpus, shape, int(cell["eval_bytes"]))
    torch.manual_seed(int(cell["seed"]))
    model: Any = build(str(cell["architecture"]), shape, corpus, text.vocab_size, str(cell["arm"]))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    train_on_segments(model, text.train, float(cell["learning_rate"]), int(cell["steps"]))
    values: Values = {
        "validation": evaluate_language_model(model, text.validation, 1)["bits_per_byte"],
        "test": evaluate_language_model(model, text.test, 1)["bits_per_byte"],
        "parameters": float(model.num_parameters()),
    }
    if cell["arm"] == "rsa":
        plain = build(str(cell["architecture"]), shape, corpus, text.vocab_size, "plain").to(model.device)
        segments = torch.arange(shape.batch * shape.segment, device=model.device).view(shape.batch, -1)
        segments = segments.remainder(text.vocab_size)
        values[TIME] = step_time_ratio(model, plain, {"input_ids": segments, "labels": segments})
    return values


def score(result: Result) -> float:
    """What the learning rate of an arm is chosen by."""
    return result.number("validation")


def summarise(results: Sequence[Result]) -> list[Row]:
    """Each arm at its best rate, and what RSA changes, seed by seed."""
    rows = []
    for settings, best in at_best_rate(results, GROUP, ARMS, score):
        for arm, runs in best.items():
            measures = {
                "bits per character": [run.number("test") for run in runs],
                "learning rate": [float(run.cell["learning_rate"]) for run in runs],
                "parameters": [run.number("parameters") for run in runs],
            }
            if arm == "rsa":
                for measure, other in ((FROM_PLAIN, "plain"), (FROM_DAMPED, DAMPED)):
                    pairs = zip(runs, best[other], strict=True)
                    measures[measure] = [rated(run.number("test")) - base.number("test") for run, base in pairs]
                measures[TIME] = [run.number(TIME) for run in runs]
            for measure, values in measures.items():
                rows.append(Row({**settings, "arm": arm}, measure, *interval(values), len(values)))
    return rows


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed where RSA is better beyond the interval than either, for both architectures and on every text."""
    differences = find_rows(rows, FROM_PLAIN)
    findings = []
    for row in differences:
        same = {name: row.settings[name] for name in GROUP}
        rsa, plain = (find_rows(rows, "bits per character", arm=arm, **same)[0].mean for arm in ("rsa", "plain"))
        [from_damped] = find_rows(rows, FROM_DAMPED, arm="rsa", **same)
        published = PUBLISHED.get((str(row.settings["corpus"]), str(row.settings["architecture"])))
        findings.append(
            f"{row.settings['architecture']} on {row.settings['corpus']} ({row.settings['model']}, "
            f"{row.settings['steps']} steps): {plain:.3f} → {rsa:.3f} bits per character, {in_words(row, '+.3f')}, "
            f"and {in_words(from_damped, '+.3f')} from P of zeros"
            + f"; a step takes {find_rows(rows, TIME, arm='rsa', **same)[0].mean:.2f} times as long"
            + (f"; published {published[1] - published[0]:+.4f}" if published else "")
        )
    fewer = sum(row.high < 0 for row in differences)
    by_recurrence = find_rows(rows, FROM_DAMPED)
    sentence = (
        f"RSA needs fewer bits per character beyond the interval in {fewer} of {len(differences)} comparisons, and "
        f"than with P of zeros in {sum(row.high < 0 for row in by_recurrence)}."
    )
    sentence += undecided([*differences, *by_recurrence], 0)
    if not find_rows(rows, FROM_PLAIN, model=PUBLISHED_SIZE):
        sentence += f" The published size, {PUBLISHED_SIZE}, is not measured: it needs a GPU."
    return Conclusion(judge([*differences, *by_recurrence], 0), sentence, tuple(findings))


def draw(results: Sequence[Result], path: Path) -> None:
    """Bits per character of every seed, and the difference that RSA makes, beside the published one."""
    groups = at_best_rate(results, GROUP, ARMS, score)
    names = [f"{s['architecture']}\n{s['corpus']}, {s['model']}" for s, _ in groups]
    differences = find_rows(summarise(results), FROM_PLAIN)
    with panels(path, 2, columns=2) as [left, right]:
        for i, (_, best) in enumerate(groups):
            for arm, colour in zip(ARMS, COLOURS, strict=False):
                scores = [run.number("test") for run in best[arm]]
                left.plot([i] * len(scores), scores, "o", color=colour, alpha=0.6, label=arm if i == 0 else None)
        left.set_ylabel("bits per character")
        left.set_title("each seed", loc="left")
        left.legend()
        for i, row in enumerate(differences):
            right.errorbar(i, row.mean, yerr=row.high - row.mean, fmt="o", color=COLOURS[1])
            published = PUBLISHED.get((str(row.settings["corpus"]), str(row.settings["architecture"])))
            if published is not None:
                right.plot(i, published[1] - published[0], "x", color=COLOURS[2])
        right.axhline(0, color="#666666", linewidth=0.8)
        right.set_title("RSA − plain (×: published, 14 layers)", loc="left")
        for axes in (left, right):
            axes.set_xticks(range(len(names)), names, fontsize=6)


def meanings(cells: Sequence[Cell]) -> Meanings:
    """The sizes, and RSA's plan in each of them."""
    models = sorted({str(cell["model"]) for cell in cells})
    corpora = sorted({str(cell["corpus"]) for cell in cells})
    return {
        "model": {model: asdict(SHAPES[model]) for model in models},
        "arm": {f"rsa, {m}, {corpus}": rsa_plan(SHAPES[m], corpus).to_dict() for m in models for corpus in corpora},
    }


EXPERIMENT = Experiment(
    name="language-model",
    claim="Transformer-XL and the Block-Recurrent Transformer need fewer bits per character with RSA heads, and it is "
    "their recurrence that does it: with P of zeros they need more.",
    published="Section 4.3, 14 layers, 400,000 steps on the whole data sets, bits per character: Block-Recurrent "
    "Transformer enwik8 1.0746 → 1.0683, text8 1.1652 → 1.1625 with RSA; Transformer-XL text8 1.164 with REMs, 1.183 "
    "with a learned Toeplitz P. The texts here are a prefix of 4.15 MB of enwik8, and text8 made of it.",
    remark="Small models have the plan of RSAConfig.from_scratch, not the published one. Quick runs have text8 alone; "
    "enwik8 is part of --full.",
    seeds={"toy": 2, "quick": 4, "full": 5},
    cells=cells,
    run_cell=run_cell,
    conclude=conclude,
    draw=draw,
    summarise=summarise,
    meanings=meanings,
    parts=GROUP,
    search_by=score,
    needs_gpu=lambda cell: cell["model"] == PUBLISHED_SIZE,
    revision=4,
)
