"""Fine-tuning: pretrained models with RSA heads against the same models without.

Test scores are compared, with early stopping by the validation score. The quick size has a small byte-level Llama that
is first trained on enwik8; the full size has SmolLM2, on 1 % of the data. Defect detection is in `calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from experiments.pretrained import load_pretrained
from experiments.pretrained_tasks import Task, text_task
from experiments.runner.comparison import Column, Comparison, all_measured, compared, measured
from experiments.runner.experiment import Experiment, Size, combinations
from experiments.runner.fit import adamw_with_linear_decay, batch_loss, default_device, evaluation_steps, fit
from experiments.runner.summary import Conclusion, Row, Rows, Settings, Values
from experiments.variants import NO_RECURRENCE, add_rsa, patched_modules
from rsa_hf import RSAConfig

PLAIN = "plain"
RSA = "rsa"  # RSAConfig()
VARIANTS: dict[str, RSAConfig | None] = {PLAIN: None, RSA: RSAConfig(), NO_RECURRENCE: RSAConfig()}

ALL = 10**9  # more than any data set has
# length: tokens in a row; most: bytes that count as all training data; scored: bytes of the validation and of the test
# text; pretraining_steps: of the small Llama.
NAMES = ("model", "task", "batch", "length", "most", "scored", "evaluations", "pretraining_steps")
# The settings above, learning rates, and the steps by share of the data.
Plan = tuple[tuple[Any, ...], tuple[float, ...], dict[float, int]]
PLANS: dict[Size, Plan] = {
    "toy": (("llama-0.03M", "c", 8, 64, 20_000, 2_000, 2, 30), (1e-2,), {1.0: 30}),
    "quick": (("llama-0.1M", "c", 8, 128, 200_000, 8_000, 4, 400), (3e-3, 1e-2), dict.fromkeys((0.01, 0.1, 1.0), 60)),
    "full": (("smollm2", "wikitext-2", 2, 256, ALL, 20_000, 2, 0), (1e-4, 3e-4, 1e-3), {0.01: 50}),
}


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Shares of the data × seeds × variants × learning rates."""
    shared, rates, shares = PLANS[size]
    return [
        {**dict(zip(NAMES, shared, strict=True)), "share": share, "steps": steps, **each}
        for share, steps in shares.items()
        for each in combinations(seed=range(seeds), arm=VARIANTS, learning_rate=rates)
    ]


def measure(settings: Settings) -> Values:
    """Fine-tune one variant. With a seed all variants see the same portion of the data in the same order."""
    variant, seed = settings["arm"], settings["seed"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, tokenizer = load_pretrained(settings["model"], pretraining_steps=settings["pretraining_steps"])
        add_rsa(model, variant, VARIANTS[variant])
        model = model.to(default_device())  # type: ignore[arg-type]
        data = {name: settings[name] for name in ("share", "most", "scored", "length", "seed")}
        task = text_task(settings["task"], tokenizer, **data)
        torch.manual_seed(seed)  # the same dropout for all variants
        learning = {name: settings[name] for name in ("learning_rate", "steps", "batch", "evaluations", "seed")}
        values = fine_tune(model, task, **learning)
    gates = [float(heads.rates()["gate"].detach().mean()) for _, heads in patched_modules(model)]
    return values | ({"gate": fmean(gates)} if gates else {})


def fine_tune(
    model: nn.Module, task: Task, *, learning_rate: float, steps: int, batch: int, evaluations: int, seed: int
) -> dict[str, Any]:
    """Train with AdamW and report the test score where validation was best, the start included; less is better.

    Evaluations are evenly spread, after one before the first step. `batch` rows make a step; `seed` shuffles them.
    """
    optimizer, schedule = adamw_with_linear_decay(model, learning_rate, steps)
    marks = evaluation_steps(steps, evaluations)
    test, validation = task.score(model, "test"), task.score(model, "validation")
    best = {task.measure: test, "before training": test, "validation": validation, "best step": 0.0}

    def evaluate(step: int, _: Tensor) -> None:
        if step in marks and (score := task.score(model, "validation")) < best["validation"]:
            best.update({task.measure: task.score(model, "test"), "validation": score, "best step": float(step)})

    loss = batch_loss(model, task.rows, batch, seed, task.collate)
    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=evaluate)
    return best


# --- results ------------------------------------------------------------------------------------------------------

GROUP = ("model", "task", "share")
BITS = "bits per byte"
GAIN = "gain"  # over the plain model, fewer bits per byte
OVER_NO_RECURRENCE = f"gain over {NO_RECURRENCE}"
TRAINED_ON = "tokens trained on, at most"


def _gain(arms: Collection[str], rival: str, name: str = BITS) -> Column:
    return compared(arms, rival, lambda run, other: other.values[name] - run.values[name])


# Learning rates are never chosen by the test score.
COMPARISON = Comparison(
    GROUP,
    (PLAIN, RSA),
    lambda run: float(run.values["validation"]),
    {
        **all_measured(BITS, "before training", "validation", "best step", "gate", "learning_rate"),
        TRAINED_ON: lambda case, arm: [
            math.prod(run.settings[name] for name in ("steps", "batch", "length")) for run in case.runs[arm]
        ],
        "seconds": measured("seconds"),
        GAIN: _gain((RSA, NO_RECURRENCE), PLAIN),
        # Negative: the cost of adding RSA heads.
        "gain before training": _gain((RSA, NO_RECURRENCE), PLAIN, "before training"),
        OVER_NO_RECURRENCE: _gain({RSA}, NO_RECURRENCE),
    },
    shown=GAIN,
    label="gain over plain, bits per byte",
    even=0,
)


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if the default plan gains significantly in every case, also over itself without recurrence."""
    gains = rows.find(GAIN, arm=RSA)
    losses, without = gains.negated(), rows.find(OVER_NO_RECURRENCE).negated()
    sentence = (
        f"Fine-tuning with RSAConfig()'s defaults gains significantly over the same model without RSA in "
        f"{losses.wins(0)} cases and loses in {gains.below(0)}."
    )
    if without:
        sentence += f" It gains significantly over the variant without recurrence in {without.wins(0)}."
    compared = Rows([*losses, *without])
    answer = "gain of RSAConfig(): " + ", ".join(
        f"{row.settings['model']} on {100 * row.settings['share']:g} % of {row.settings['task']} "
        f"{row.mean:+.3f} {BITS}"
        for row in gains
    )
    findings = tuple(_finding(rows, row) for row in gains)
    return Conclusion(compared.judge(0), answer, sentence + compared.undecided(0), findings)


def _finding(rows: Rows, gain: Row) -> str:
    model, task, share = gain.pick(GROUP).values()
    tokens = rows.mean(TRAINED_ON, **gain.settings)
    text = f"{model}, {task}, {100 * share:g} %, {tokens:,.0f} tokens: {gain.text('+.3f')} {BITS}"
    for over in rows.find(OVER_NO_RECURRENCE, **gain.settings):
        text += f"; {over.text('+.3f')} {BITS} over no recurrence"
    return text


EXPERIMENT = Experiment(
    name="fine-tune",
    claim="A pretrained model with RSA heads (RSAConfig()'s defaults) is better after fine-tuning than the same model "
    "without them, on little and on much data.",
    published="None for text. The paper detects defects in C functions (section 4.3), with other models; its "
    "figures are not at hand.",
    seeds={"toy": 2, "quick": 4, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=COMPARISON.draw,
    summarise=COMPARISON.summarise,
    parts=(*GROUP, "arm"),
    search_by=COMPARISON.score,
)
