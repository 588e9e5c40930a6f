"""Language modelling: Transformer-XL and the Block-Recurrent Transformer with and without RSA heads.

Memory is carried along the text in training and evaluation. With the first seed all variants are trained at every
learning rate; each is then trained with the other seeds at the rate that had the fewest bits per character on the
validation text. The test text is reported. On bytes (enwik8), a character is a byte.

The published models have 14 layers and were trained on 4.5 billion characters of the whole data sets. Here the text is
a prefix of enwik8 of 4.15 MB, and text8 made from it, so only the differences that RSA makes can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rsa_hf.experiments.language_model.models import (
    ARCHITECTURES,
    PUBLISHED_SIZE,
    SHAPES,
    VARIANTS,
    build,
    read_segments,
    rsa_plan,
    train_on_segments,
)
from rsa_hf.experiments.runner.conclusion import Conclusion, judge, undecided
from rsa_hf.experiments.runner.experiment import Experiment, Glossary, Size
from rsa_hf.experiments.runner.fit import default_device, step_time_ratio
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
    with_interval,
    worst_if_nan,
)
from rsa_hf.experiments.variants import NO_RECURRENCE
from rsa_hf.plots import COLOURS, panels
from rsa_hf.tasks.language_modeling import evaluate_language_model

__all__ = ["EXPERIMENT"]

GROUP = ("corpus", "architecture", "model", "steps")
OVER_PLAIN, OVER_NO_RECURRENCE = "rsa − plain", f"rsa − {NO_RECURRENCE}"
TIME = "time of a step / plain"
# Bits per character without and with RSA heads.
PUBLISHED = {
    ("enwik8", "block-recurrent"): (1.0746, 1.0683),
    ("text8", "block-recurrent"): (1.1652, 1.1625),
}


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Texts and sizes × seeds × architectures × variants × learning rates."""
    eval_bytes = 4_000 if size == "toy" else 12_000 if size == "quick" else 100_000
    sizes: list[tuple[str, str, int, tuple[float, ...]]]
    if size == "toy":
        sizes = [("python", "small", 60, (1e-2,))]
    elif size == "quick":
        sizes = [("text8", "small", 150, (5e-3, 1e-2))]
    else:
        sizes = [(corpus, "small", 2000, (1e-3, 3e-3, 1e-2)) for corpus in ("enwik8", "text8")]
        sizes += [(corpus, PUBLISHED_SIZE, 3000, (1e-4, 2.5e-4, 5e-4)) for corpus in ("enwik8", "text8")]
    return [
        {
            "corpus": corpus,
            "architecture": architecture,
            "model": model,
            "steps": steps,
            "eval_bytes": eval_bytes,
            "arm": variant,
            "learning_rate": rate,
            "seed": seed,
        }
        for corpus, model, steps, rates in sizes
        for seed in range(seeds)
        for architecture in ARCHITECTURES
        for variant in VARIANTS
        for rate in rates
    ]


def measure(settings: Settings) -> Values:
    """Bits per character on the validation and the test text after training."""
    shape, corpus, architecture = (
        SHAPES[str(settings["model"])],
        str(settings["corpus"]),
        str(settings["architecture"]),
    )
    text = read_segments(corpus, shape, int(settings["eval_bytes"]))
    torch.manual_seed(int(settings["seed"]))
    model: Any = build(architecture, shape, corpus, text.vocab_size, str(settings["arm"]))
    model.to(default_device())
    train_on_segments(model, text.train, float(settings["learning_rate"]), int(settings["steps"]))
    values: Values = {
        "validation": evaluate_language_model(model, text.validation, 1)["bits_per_byte"],
        "test": evaluate_language_model(model, text.test, 1)["bits_per_byte"],
        "parameters": float(model.num_parameters()),
    }
    if settings["arm"] == "rsa":
        plain = build(architecture, shape, corpus, text.vocab_size, "plain").to(model.device)
        segments = torch.arange(shape.batch * shape.segment, device=model.device).view(shape.batch, -1)
        segments = segments.remainder(text.vocab_size)
        values[TIME] = step_time_ratio(model, plain, {"input_ids": segments, "labels": segments})
    return values


def validation_score(run: Run) -> float:
    """The score that learning rates are chosen by."""
    return run.number("validation")


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Rows of each variant at its best rate, and of RSA compared with the others seed by seed."""
    rows = []
    for group, best in at_best_rate(runs, GROUP, VARIANTS, validation_score):
        for variant, found in best.items():
            columns = {
                "bits per character": [run.number("test") for run in found],
                "learning rate": [float(run.settings["learning_rate"]) for run in found],
                "parameters": [run.number("parameters") for run in found],
            }
            if variant == "rsa":
                for name, other in ((OVER_PLAIN, "plain"), (OVER_NO_RECURRENCE, NO_RECURRENCE)):
                    columns[name] = paired(
                        found, best[other], lambda a, b: worst_if_nan(a.number("test")) - b.number("test")
                    )
                columns[TIME] = [run.number(TIME) for run in found]
            rows += make_rows({**group, "arm": variant}, columns)
    return rows


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed if RSA is significantly better than both others, for both architectures and on every text."""
    over_plain, over_no_recurrence = find_rows(rows, OVER_PLAIN), find_rows(rows, OVER_NO_RECURRENCE)
    fewer, by_recurrence = (sum(row.high < 0 for row in each) for each in (over_plain, over_no_recurrence))
    compared = [*over_plain, *over_no_recurrence]
    sentence = (
        f"RSA needs significantly fewer bits per character in {fewer} of {len(over_plain)} comparisons with the plain "
        f"model, and in {by_recurrence} with the variant without recurrence.{undecided(compared, 0)}"
    )
    if not find_rows(rows, OVER_PLAIN, model=PUBLISHED_SIZE):
        sentence += f" The published size, {PUBLISHED_SIZE}, is not measured: it needs a GPU."
    return Conclusion(judge(compared, 0), sentence, tuple(_finding(rows, row) for row in over_plain))


def _finding(rows: Sequence[Row], over_plain: Row) -> str:
    group = {name: over_plain.settings[name] for name in GROUP}
    rsa, plain = (find_rows(rows, "bits per character", arm=name, **group)[0].mean for name in ("rsa", "plain"))
    [over_no_recurrence], [time] = (find_rows(rows, name, arm="rsa", **group) for name in (OVER_NO_RECURRENCE, TIME))
    text = (
        f"{group['architecture']} on {group['corpus']} ({group['model']}, {group['steps']} steps): {plain:.3f} → "
        f"{rsa:.3f} bits per character, {with_interval(over_plain, '+.3f')}, and "
        f"{with_interval(over_no_recurrence, '+.3f')} relative to no recurrence; a step takes {time.mean:.2f} times "
        "as long"
    )
    published = _published_difference(over_plain)
    return text if published is None else f"{text}; published {published:+.4f}"


def _published_difference(row: Row) -> float | None:
    published = PUBLISHED.get((str(row.settings["corpus"]), str(row.settings["architecture"])))
    return published[1] - published[0] if published else None


def draw(runs: Sequence[Run], path: Path) -> None:
    """Bits per character of every seed, and the difference that RSA makes beside the published one."""
    groups = at_best_rate(runs, GROUP, VARIANTS, validation_score)
    names = [f"{s['architecture']}\n{s['corpus']}, {s['model']}" for s, _ in groups]
    with panels(path, 2, columns=2) as [left, right]:
        for i, (_, best) in enumerate(groups):
            for variant, colour in zip(VARIANTS, COLOURS, strict=False):
                scores = [run.number("test") for run in best[variant]]
                label = variant if i == 0 else None
                left.plot([i] * len(scores), scores, "o", color=colour, alpha=0.6, label=label)
        left.set_ylabel("bits per character")
        left.set_title("each seed", loc="left")
        left.legend()
        for i, row in enumerate(find_rows(summarise(runs), OVER_PLAIN)):
            right.errorbar(i, row.mean, yerr=error_bars([row]), fmt="o", color=COLOURS[1])
            if (published := _published_difference(row)) is not None:
                right.plot(i, published, "x", color=COLOURS[2])
        right.axhline(0, color="#666666", linewidth=0.8)
        right.set_title("RSA − plain (×: published, 14 layers)", loc="left")
        for axes in (left, right):
            axes.set_xticks(range(len(names)), names, fontsize=6)


def glossary(grid: Sequence[Settings]) -> Glossary:
    """Sizes, and the head plan at each size."""
    models, corpora = (sorted({str(settings[name]) for settings in grid}) for name in ("model", "corpus"))
    return {
        "model": {model: asdict(SHAPES[model]) for model in models},
        "arm": {f"rsa, {m}, {corpus}": rsa_plan(SHAPES[m], corpus).to_dict() for m in models for corpus in corpora},
    }


EXPERIMENT = Experiment(
    name="language-model",
    claim="Transformer-XL and the Block-Recurrent Transformer need fewer bits per character with RSA heads. "
    "Recurrence is the cause: without it (P = 0) they need more.",
    published="Section 4.3, 14 layers, 400,000 steps on the whole data sets, bits per character: Block-Recurrent "
    "Transformer enwik8 1.0746 → 1.0683, text8 1.1652 → 1.1625 with RSA; Transformer-XL text8 1.164 with REMs, 1.183 "
    "with a learned Toeplitz P. The texts here are a prefix of enwik8 of 4.15 MB, and text8 made from it.",
    remark="Small models have the plan of RSAConfig.from_scratch, not the published one. Quick runs use text8 alone; "
    "enwik8 is part of --full.",
    seeds={"toy": 2, "quick": 4, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=draw,
    summarise=summarise,
    glossary=glossary,
    parts=GROUP,
    search_by=validation_score,
    needs_gpu=lambda settings: settings["model"] == PUBLISHED_SIZE,
    revision=4,
)
