"""Fine-tuning: pretrained models with RSA heads against the same models without, on little and on much data.

With the first seed every variant is trained at every learning rate, and with the other seeds at the one with the best
validation score, with early stopping; test scores are compared. The quick size has a small byte-level Llama that is
first trained on enwik8; MiniLM and SmolLM2 belong to the full size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from rsa_hf.config import RSAConfig
from rsa_hf.experiments.fine_tune.grid import DEFAULT, DEVIGN, FULL_MODELS, PLAIN, VARIANTS, make_grid
from rsa_hf.experiments.fine_tune.training import defect_task, fine_tune, load_pretrained, text_task
from rsa_hf.experiments.runner.conclusion import Conclusion, judge, undecided
from rsa_hf.experiments.runner.experiment import Experiment, Glossary
from rsa_hf.experiments.runner.fit import default_device
from rsa_hf.experiments.runner.summary import (
    Row,
    Run,
    Setting,
    Settings,
    Values,
    at_best_rate,
    error_bars,
    find_rows,
    make_rows,
    paired,
    scaled,
    with_interval,
)
from rsa_hf.experiments.variants import NO_RECURRENCE, add_rsa
from rsa_hf.heads import heads_of
from rsa_hf.plots import COLOURS, panels

__all__ = ["EXPERIMENT"]

GROUP = ("model", "task", "share")
GAIN = "gain"  # over the plain model: fewer bits per byte, or more functions classified correctly
OVER_NO_RECURRENCE = f"gain over {NO_RECURRENCE}"
OVER_DEFAULT = "gain over the default plan"
TRAINED_ON = "tokens trained on, at most"
GAIN_BEFORE = "gain before training"  # negative: the cost of adding RSA heads
UNITS = {"accuracy": ("percentage points of accuracy", 100), "bits per byte": ("bits per byte", 1)}


def measure(settings: Settings) -> Values:
    """Fine-tune one variant. With a seed all variants see the same portion of the data in the same order."""
    seed = int(settings["seed"])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, tokenizer = load_pretrained(
            str(settings["model"]), int(settings["layers"]), int(settings["pretraining_steps"])
        )
        variant = str(settings["arm"])
        add_rsa(model, variant, VARIANTS[variant])
        model = model.to(default_device())  # type: ignore[arg-type]
        data = {name: int(settings[name]) for name in ("most", "scored", "length", "seed")}
        share = float(settings["share"])
        if settings["task"] == DEVIGN:
            task = defect_task(tokenizer, share=share, **data)
        else:
            task = text_task(str(settings["task"]), tokenizer, share=share, **data)
        torch.manual_seed(seed)  # the same dropout for all variants
        scores = fine_tune(
            model,
            task,
            learning_rate=float(settings["learning_rate"]),
            steps=int(settings["steps"]),
            batch=int(settings["batch"]),
            evaluations=int(settings["evaluations"]),
            seed=seed,
        )
    gates = [float(heads.rates()["gate"].detach().mean()) for heads in filter(None, map(heads_of, model.modules()))]
    return {
        task.measure: scores.test,
        "before training": scores.start,
        "validation": scores.best_validation,
        "best step": float(scores.best_step),
        **({"gate": sum(gates) / len(gates)} if gates else {}),
        "steps scored": scores.steps,
        "validation scores": scores.validation,
    }


def _score_name(run: Run) -> str:
    return next(name for name in UNITS if name in run.values)


def _goodness(run: Run, name: str) -> float:
    """A score of which more is better."""
    return run.number(name) * (-1 if _score_name(run) == "bits per byte" else 1)


def by_validation(run: Run) -> float:
    """The score that learning rates are chosen by, lower being better; never the test score."""
    return -_goodness(run, "validation")


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Rows of each variant at its best learning rate, with its gains over the others seed by seed."""
    rows = []
    for group, best in at_best_rate(runs, GROUP, (PLAIN, DEFAULT), by_validation):
        for variant, found in best.items():
            names = [name for name, value in found[0].values.items() if not isinstance(value, list)]
            columns = {name: [run.number(name) for run in found] for name in names}
            columns["learning rate"] = [float(run.settings["learning_rate"]) for run in found]
            columns[TRAINED_ON] = [
                math.prod(int(run.settings[name]) for name in ("steps", "batch", "length")) for run in found
            ]
            columns["seconds"] = [run.seconds for run in found]
            if variant != PLAIN:
                score = _score_name(found[0])
                columns[GAIN] = _gains(found, best[PLAIN], score)
                columns[GAIN_BEFORE] = _gains(found, best[PLAIN], "before training")
                if variant == DEFAULT and NO_RECURRENCE in best:
                    columns[OVER_NO_RECURRENCE] = _gains(found, best[NO_RECURRENCE], score)
                elif variant != DEFAULT:
                    columns[OVER_DEFAULT] = _gains(found, best[DEFAULT], score)
            rows += make_rows({**group, "arm": variant}, columns)
    return rows


def _gains(runs: Sequence[Run], others: Sequence[Run], name: str) -> list[float]:
    return paired(runs, others, lambda run, other: _goodness(run, name) - _goodness(other, name))


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed if the default plan gains significantly in every case, also over itself without recurrence."""
    gains, by_recurrence = find_rows(rows, GAIN, arm=DEFAULT), find_rows(rows, OVER_NO_RECURRENCE)
    gained, lost = sum(row.low > 0 for row in gains), sum(row.high < 0 for row in gains)
    sentence = (
        f"Fine-tuning with RSAConfig()'s defaults ({DEFAULT}: initial μ, and learning rate as a multiple of the "
        f"weights') gains significantly over the same model without RSA in {gained} of {len(gains)} cases and loses "
        f"in {lost}."
    )
    if by_recurrence:
        count = sum(row.low > 0 for row in by_recurrence)
        sentence += f" It gains significantly over the variant without recurrence in {count} of {len(by_recurrence)}."
    if not any(row.settings["model"] in FULL_MODELS for row in rows):
        sentence += f" Only --full has {' and '.join(FULL_MODELS)}."
    findings = []
    for row in gains:
        [tokens] = find_rows(rows, TRAINED_ON, **row.settings)
        model, task, share = (row.settings[name] for name in GROUP)
        text = f"{model}, {task}, {100 * float(share):g} %, {tokens.mean:,.0f} tokens: {_gain_text(rows, row)}"
        for over in find_rows(rows, OVER_NO_RECURRENCE, **row.settings):
            text += f"; {_gain_text(rows, over)} over no recurrence"
        findings.append(text)
    for names in (("gate_init",), ("parameter_scale",), ("nu_init", "theta_init")):
        findings += _best_of(rows, names)
    losses = [scaled(row, -1) for row in [*gains, *by_recurrence]]
    return Conclusion(judge(losses, 0), sentence + undecided(losses, 0), tuple(findings))


def _best_of(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """The best of the variants that differ in these settings alone, for each model and task, by mean gain.

    Means are over the shares of the data that all of these variants have run on.
    """
    has_run = {str(row.settings["arm"]) for row in rows}
    default = {name: getattr(RSAConfig(), name) for name in names}
    variants = [
        name
        for name, config in VARIANTS.items()
        if name in has_run and name != NO_RECURRENCE and config and replace(config, **default) == RSAConfig()
    ]
    cases: dict[tuple[Setting, Setting], list[list[Row]]] = {}
    for first in find_rows(rows, GAIN, arm=DEFAULT):
        group = {name: first.settings[name] for name in GROUP}
        found = [row for name in variants for row in find_rows(rows, GAIN, arm=name, **group)]
        if len(found) == len(variants) > 1:
            cases.setdefault((group["model"], group["task"]), []).append(found)
    texts = []
    for (model, task), shares in cases.items():
        columns = dict(zip(variants, zip(*shares, strict=True), strict=True))
        gains = {name: fmean(row.mean for row in column) for name, column in columns.items()}
        before = {
            name: fmean(find_rows(rows, GAIN_BEFORE, **row.settings)[0].mean for row in column)
            for name, column in columns.items()
        }
        unit, factor = _unit(rows, shares[0][0])
        listed = ", ".join(
            f"{name}: {factor * gains[name]:+.3f} and {factor * before[name]:+.3f}" for name in variants
        )
        best = max(gains, key=lambda name: gains[name])
        n = len(shares)
        text = f"on {model}, {task}, {best} gains most over {n} share{'s' if n > 1 else ''} of the data"
        if best != DEFAULT:
            over = [find_rows(rows, OVER_DEFAULT, **row.settings)[0] for row in columns[best]]
            text += f", significantly more than the default in {sum(row.low > 0 for row in over)}"
        texts.append(f"{text} (mean gains after and before training, {unit}: {listed})")
    return texts


def _unit(rows: Sequence[Row], row: Row) -> tuple[str, int]:
    """Unit and factor of the score of a row's task."""
    return next(unit for name, unit in UNITS.items() if find_rows(rows, name, **row.settings))


def _gain_text(rows: Sequence[Row], row: Row) -> str:
    unit, factor = _unit(rows, row)
    return f"{with_interval(scaled(row, factor), '+.3f')} {unit}"


def draw(runs: Sequence[Run], path: Path) -> None:
    """A panel for each model, task and share: gains over the plain model with 95 % intervals."""
    rows = find_rows(summarise(runs), GAIN)
    groups = list(dict.fromkeys(tuple(row.settings[name] for name in GROUP) for row in rows))
    names = [name for name in VARIANTS if any(row.settings["arm"] == name for row in rows)]
    with panels(path, len(groups)) as grid:
        for axes, (model, task, share) in zip(grid, groups, strict=True):
            for row in find_rows(rows, GAIN, model=model, task=task, share=share):
                colour = COLOURS[1] if row.settings["arm"] == DEFAULT else COLOURS[0]
                place = names.index(str(row.settings["arm"]))
                axes.errorbar([row.mean], [place], xerr=error_bars([row]), fmt="o", capsize=3, color=colour)
            axes.axvline(0, color="#666666", linewidth=0.8)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_title(f"{model}, {task}, {100 * float(share):g} %", loc="left")
            axes.set_xlabel("gain in accuracy" if task == DEVIGN else "gain in bits per byte")


def glossary(grid: Sequence[Settings]) -> Glossary:
    """The config of each variant."""
    names = dict.fromkeys(str(settings["arm"]) for settings in grid)
    return {"arm": {name: config.to_dict() for name in names if (config := VARIANTS[name]) is not None}}


EXPERIMENT = Experiment(
    name="fine-tune",
    claim="A pretrained model with RSA heads (RSAConfig()'s defaults) is better after fine-tuning than the same model "
    "without them, on little and on much data.",
    published="The paper detects defects in C functions too (section 4.3), with other models; its figures are not at "
    "hand. Without RSA, CodeBERT is reported at 62.08 % accuracy on all of Devign (CodeXGLUE).",
    seeds={"toy": 2, "quick": 4, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=draw,
    summarise=summarise,
    glossary=glossary,
    parts=(*GROUP, "arm"),
    search_by=by_validation,
)
