"""Fine-tuning: pretrained models with RSA heads against the same models without.

With the first seed every variant is trained at every learning rate, and with the other seeds at the one with the best
validation score, with early stopping; test scores are compared. The quick size has a small byte-level Llama that is
first trained on enwik8; the full size has SmolLM2, on 1 % of the data. Defect detection with these heads is in the
experiment `calibrate`, beside the heads that it chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from experiments.pretrained import load_pretrained
from experiments.pretrained_tasks import Task, text_task
from experiments.runner.comparison import Case, Comparison
from experiments.runner.experiment import Experiment, Size, combinations
from experiments.runner.fit import adamw_with_linear_decay, batch_loss, default_device, evaluation_steps, fit
from experiments.runner.summary import Conclusion, Row, Rows, Settings, Values
from experiments.variants import NO_RECURRENCE, add_rsa, patched_modules
from rsa_hf import RSAConfig

PLAIN = "plain"
GATES = (-6.0, -3.0, 0.0, 1.0)
MULTIPLES = (1.0, 20.0, 100.0)  # learning rates of gates and rates, in multiples of the weights'


def _name(config: RSAConfig) -> str:
    """Name of a variant, without a comma because `--only` splits at commas."""
    spread = " theta spread" if isinstance(config.theta_init, tuple) else ""
    return f"mu {config.gate_init:+g} x{config.parameter_scale:g}{spread}"


DEFAULT = _name(RSAConfig())
_SCRATCH = RSAConfig.from_scratch(1)
# Each differs from the default in one respect.
_CONFIGS = [
    *(RSAConfig(gate_init=gate) for gate in GATES),
    *(RSAConfig(parameter_scale=multiple) for multiple in MULTIPLES),
    replace(RSAConfig(), nu_init=_SCRATCH.nu_init, theta_init=_SCRATCH.theta_init),
]
VARIANTS: dict[str, RSAConfig | None] = {
    PLAIN: None,
    DEFAULT: RSAConfig(),
    NO_RECURRENCE: RSAConfig(),
    **{_name(config): config for config in _CONFIGS},
}

ALL = 10**9  # more than any data set has
_CLAIM = (PLAIN, DEFAULT, NO_RECURRENCE)
# length: tokens in a row; most: bytes that count as all training data; scored: bytes of the validation and of the test
# text; pretraining_steps: of the small Llama.
NAMES = ("model", "task", "batch", "length", "most", "scored", "evaluations", "pretraining_steps")
# For each model and task: the settings above, learning rates, and by share of the data the steps and variants. All
# variants run at one share, those of the claim at the others.
Plan = tuple[tuple[Any, ...], tuple[float, ...], dict[float, tuple[int, tuple[str, ...]]]]
PLANS: dict[Size, Plan] = {
    "toy": (("llama-0.03M", "c", 8, 64, 20_000, 2_000, 2, 30), (1e-2,), {1.0: (30, _CLAIM)}),
    "quick": (
        ("llama-0.1M", "c", 8, 128, 200_000, 8_000, 4, 400),
        (3e-3, 1e-2),
        {0.01: (60, _CLAIM), 0.1: (60, tuple(VARIANTS)), 1.0: (60, _CLAIM)},
    ),
    "full": (("smollm2", "wikitext-2", 2, 256, ALL, 20_000, 2, 0), (1e-4, 3e-4, 1e-3), {0.01: (50, _CLAIM)}),
}


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Shares of the data × seeds × variants × learning rates."""
    shared, rates, shares = PLANS[size]
    return [
        {**dict(zip(NAMES, shared, strict=True)), "share": share, "steps": steps, **each}
        for share, (steps, variants) in shares.items()
        for each in combinations(seed=range(seeds), arm=variants, learning_rate=rates)
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

    The learning rate warms up over a tenth of the steps and falls linearly to 0. Evaluations are evenly spread, after
    one before the first step. `batch` rows make a step, and `seed` shuffles them.

    Returns:
        The test scores at the best step and before the first one, the best validation score and its step; then the
        validation scores, the first before training, and their steps.
    """
    optimizer, schedule = adamw_with_linear_decay(model, learning_rate, steps)
    marks = evaluation_steps(steps, evaluations)
    start = best_test = task.score(model, "test")
    scores, best_step = {0: task.score(model, "validation")}, 0

    def evaluate(step: int, _: Tensor) -> None:
        nonlocal best_step, best_test
        if step in marks:
            scores[step] = task.score(model, "validation")
            if scores[step] < scores[best_step]:
                best_step, best_test = step, task.score(model, "test")

    loss = batch_loss(model, task.rows, batch, seed, task.collate)
    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=evaluate)
    return {
        task.measure: best_test,
        "before training": start,
        "validation": scores[best_step],
        "best step": float(best_step),
        "steps scored": [float(step) for step in scores],
        "validation scores": [*scores.values()],
    }


# --- results ------------------------------------------------------------------------------------------------------

GROUP = ("model", "task", "share")
BITS = "bits per byte"
GAIN = "gain"  # over the plain model, fewer bits per byte
OVER_NO_RECURRENCE = f"gain over {NO_RECURRENCE}"
OVER_DEFAULT = "gain over the default plan"
TRAINED_ON = "tokens trained on, at most"
GAIN_BEFORE = "gain before training"  # negative: the cost of adding RSA heads


def make_columns(case: Case, arm: str) -> dict[str, list[float]]:
    """All scores of a variant, and its gains over the others."""
    columns = case.numbers(arm)
    columns[TRAINED_ON] = [
        math.prod(r.settings[name] for name in ("steps", "batch", "length")) for r in case.runs[arm]
    ]
    columns["seconds"] = [run.seconds for run in case.runs[arm]]

    def gain(other: str, name: str = BITS) -> list[float]:
        return case.compare(arm, other, lambda run, against: against.values[name] - run.values[name])

    if arm != PLAIN:
        columns[GAIN], columns[GAIN_BEFORE] = gain(PLAIN), gain(PLAIN, "before training")
        if arm == DEFAULT and NO_RECURRENCE in case.runs:
            columns[OVER_NO_RECURRENCE] = gain(NO_RECURRENCE)
        elif arm != DEFAULT:
            columns[OVER_DEFAULT] = gain(DEFAULT)
    return columns


# Learning rates are never chosen by the test score.
COMPARISON = Comparison(
    GROUP,
    (PLAIN, DEFAULT),
    lambda run: float(run.values["validation"]),
    make_columns,
    GAIN,
    "gain over plain, bits per byte",
    0,
)


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if the default plan gains significantly in every case, also over itself without recurrence."""
    gains = rows.find(GAIN, arm=DEFAULT)
    losses, without = gains.negated(), rows.find(OVER_NO_RECURRENCE).negated()
    sentence = (
        f"Fine-tuning with RSAConfig()'s defaults ({DEFAULT}: initial μ, and learning rate as a multiple of the "
        f"weights') gains significantly over the same model without RSA in {losses.below(0)} of {len(gains)} cases "
        f"and loses in {gains.below(0)}."
    )
    if without:
        count = f"{without.below(0)} of {len(without)}"
        sentence += f" It gains significantly over the variant without recurrence in {count}."
    findings = []
    for row in gains:
        tokens, (model, task, share) = rows.mean(TRAINED_ON, **row.settings), (row.settings[name] for name in GROUP)
        text = f"{model}, {task}, {100 * share:g} %, {tokens:,.0f} tokens: {_gain_text(row)}"
        for over in rows.find(OVER_NO_RECURRENCE, **row.settings):
            text += f"; {_gain_text(over)} over no recurrence"
        findings.append(text)
    for names in (("gate_init",), ("parameter_scale",), ("nu_init", "theta_init")):
        findings += _best_of(rows, names)
    compared = Rows([*losses, *without])
    answer = "gain of RSAConfig(): " + ", ".join(
        f"{row.settings['model']} on {100 * row.settings['share']:g} % of {row.settings['task']} "
        f"{row.mean:+.3f} {BITS}"
        for row in gains
    )
    return Conclusion(compared.judge(0), answer, sentence + compared.undecided(0), tuple(findings))


def _best_of(rows: Rows, names: Sequence[str]) -> list[str]:
    """The best of the variants that differ in these settings alone, by mean gain.

    Means are over the shares of the data that all of these variants have run on.
    """
    has_run = {row.settings["arm"] for row in rows}
    default = {name: getattr(RSAConfig(), name) for name in names}
    variants = [
        name
        for name, config in VARIANTS.items()
        if name in has_run and name != NO_RECURRENCE and config and replace(config, **default) == RSAConfig()
    ]
    cases = [{name: row.settings[name] for name in GROUP} for row in rows.find(GAIN, arm=DEFAULT)]
    cases = [case for case in cases if all(rows.find(GAIN, arm=name, **case) for name in variants)]
    if len(variants) < 2 or not cases:
        return []
    gains, before = (
        {name: fmean(rows.mean(measure, arm=name, **case) for case in cases) for name in variants}
        for measure in (GAIN, GAIN_BEFORE)
    )
    listed = ", ".join(f"{name}: {gains[name]:+.3f} and {before[name]:+.3f}" for name in variants)
    best, n = max(gains, key=lambda name: gains[name]), len(cases)
    text = "on {model}, {task}, ".format(**cases[0])
    text += f"{best} gains most over {n} share{'s' if n > 1 else ''} of the data"
    if best != DEFAULT:
        over = sum(rows.find(OVER_DEFAULT, arm=best, **case)[0].low > 0 for case in cases)
        text += f", significantly more than the default in {over}"
    return [f"{text} (mean gains after and before training, {BITS}: {listed})"]


def _gain_text(row: Row) -> str:
    return f"{row.text('+.3f')} {BITS}"


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
