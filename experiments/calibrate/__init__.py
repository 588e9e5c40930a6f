"""Calibration: pretrained models with the heads that `calibrate` chooses, against controls that could explain a gain.

Every variant is scored with nothing trained, and after training: the numbers of its heads alone, with the base frozen;
everything; or LoRA beside it. The model is calibrated on rows of the data that it is then trained on. Each seed has
another portion of the training text, other rows to calibrate on, and another part of the test text. With the first
seed every variant is trained at every learning rate, and with the others at the one with the best validation score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.calibrate.training import DEVIGN, EVERYTHING, LORA_TRAINED, NOTHING, NUMBERS, measure
from experiments.calibrate.variants import (
    AFTER,
    ALL_SCALED,
    CALIBRATED,
    FIRST,
    IA3,
    LORA,
    PLAIN,
    RANDOM,
    SCALED,
    WITH_ALL_FACTORS,
    WITH_FACTORS,
)
from experiments.runner.comparison import Case, Comparison
from experiments.runner.experiment import Experiment, Size, combinations
from experiments.runner.summary import Conclusion, Row, Rows, Run, Settings, worst_if_nan
from experiments.variants import NO_RECURRENCE

ALL = 10**9  # more than any data set has
# model, task, tokens in a row, rows in a step, rows to calibrate on, size of the test split (bytes or functions), what
# counts as all training data, layers of MiniLM, steps of pretraining of a byte-level model.
NAMES = ("model", "task", "length", "batch", "rows", "scored", "most", "layers", "pretraining_steps")
# For each model and task: the settings above, the learning rates for each thing to train, and for each share of the
# data and each thing to train the steps and the variants.
Rates = Mapping[str, tuple[float, ...]]
Part = tuple[float, str, int, Sequence[str]]
Plan = tuple[tuple[Any, ...], Rates, list[Part]]


# The tables of results have the best rate of each variant; LoRA and IA3 need far higher ones than gates do.
def _rates(numbers: tuple[float, ...], everything: tuple[float, ...], lora: tuple[float, ...]) -> Rates:
    return {NUMBERS: numbers, EVERYTHING: everything, LORA_TRAINED: lora}


_BYTE_RATES = _rates((1e-2, 1e-1), (3e-3, 1e-2), (1e-2, 3e-2))
_WIDER_BYTE_RATES = _rates((1e-2, 3e-2, 1e-1), (1e-3, 3e-3, 1e-2), (3e-3, 1e-2, 3e-2))
_PACKAGED_RATES = _rates((3e-3, 1e-2, 3e-2), (1e-4, 3e-4), (1e-3, 3e-3))

_UNTRAINED = (PLAIN, FIRST, RANDOM, NO_RECURRENCE, CALIBRATED)
_OF_NUMBERS = (PLAIN, NO_RECURRENCE, ALL_SCALED, CALIBRATED, WITH_FACTORS, WITH_ALL_FACTORS, LORA, IA3)
_OF_EVERYTHING = (PLAIN, FIRST, SCALED, CALIBRATED)
_CLAIM_OF_EVERYTHING = (PLAIN, SCALED, CALIBRATED)
_OF_LORA = (PLAIN, CALIBRATED)


def _parts(share: float, steps: int, everything: Sequence[str] = _OF_EVERYTHING) -> list[Part]:
    return [
        (share, NOTHING, 0, _UNTRAINED),
        (share, NUMBERS, steps, _OF_NUMBERS),
        (share, EVERYTHING, steps, everything),
        (share, LORA_TRAINED, steps, _OF_LORA),
    ]


def _smollm2(task: str) -> tuple[Any, ...]:
    return "smollm2", task, 256, 2, 64, 20_000, ALL, 0, 0


PLANS: dict[Size, list[Plan]] = {
    "toy": [
        (
            ("llama-0.03M", "c", 64, 4, 24, 2_000, 20_000, 0, 30),
            _rates((1e-3,), (1e-3,), (1e-3,)),
            _parts(1.0, 4, (*_CLAIM_OF_EVERYTHING, AFTER)),
        )
    ],
    "quick": [
        ((f"{family}-0.1M", "c", 128, 8, 48, 20_000, ALL, 0, 600), _BYTE_RATES, _parts(0.1, 60))
        for family in ("gpt2", "llama")
    ],
    "full": [
        *(
            (
                (f"{family}-1.5M", "c", 256, 8, 64, 40_000, ALL, 0, 3000),
                _WIDER_BYTE_RATES,
                [
                    *_parts(0.01, 100),
                    (0.01, EVERYTHING, 100, (AFTER,)),
                    (0.1, EVERYTHING, 400, _CLAIM_OF_EVERYTHING),
                ],
            )
            for family in ("gpt2", "llama")
        ),
        (
            _smollm2("wikitext-2"),
            _PACKAGED_RATES,
            [
                (0.01, NOTHING, 0, _UNTRAINED),
                (0.01, NUMBERS, 100, _OF_NUMBERS),
                (0.01, EVERYTHING, 50, (*_OF_EVERYTHING, AFTER)),
                (0.01, LORA_TRAINED, 50, _OF_LORA),
                (0.1, EVERYTHING, 100, _CLAIM_OF_EVERYTHING),
            ],
        ),
        (_smollm2("c"), _PACKAGED_RATES, [(0.01, NOTHING, 0, _UNTRAINED)]),
        (_smollm2("python"), _PACKAGED_RATES, [(0.1, NOTHING, 0, _UNTRAINED)]),
        (("minilm", DEVIGN, 48, 32, 512, ALL, ALL, 6, 0), _PACKAGED_RATES, [(1.0, EVERYTHING, 680, _OF_LORA)]),
    ],
}


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Models and tasks × what is trained × variants × learning rates × seeds; MiniLM has twice the seeds.

    Seeds change fastest: the first processes then calibrate for different seeds, and do not wait for each other.
    """
    return [
        {**dict(zip(NAMES, shared, strict=True)), "share": share, "trained": trained, "steps": steps, **each}
        for shared, rates, parts in PLANS[size]
        for share, trained, steps, variants in parts
        for each in combinations(
            arm=variants,
            learning_rate=rates.get(trained, (0.0,)),
            seed=range(2 * seeds if shared[0] == "minilm" else seeds),
        )
    ]


# --- results ------------------------------------------------------------------------------------------------------

GROUP = ("model", "task", "share", "trained")
GAIN = "gain"  # over the plain model: fewer nats per token, or more functions classified correctly
# The control that a variant has to beat.
RIVALS = {
    NUMBERS: {WITH_FACTORS: ALL_SCALED, WITH_ALL_FACTORS: ALL_SCALED, CALIBRATED: NO_RECURRENCE},
    EVERYTHING: {CALIBRATED: SCALED},
}


def _loss(run: Run, name: str = "score") -> float:
    """A score, negated where it is an accuracy."""
    return float(run.values[name]) * (-1 if run.settings["task"] == DEVIGN else 1)


def _gain(run: Run, against: Run) -> float:
    """Of two runs from the same pretrained weights; the oldest groups of runs were stored without a digest of them."""
    if run.values.get("weights") != against.values.get("weights"):
        raise ValueError(f"{run.settings} and {against.settings} started from different weights. Run both again.")
    return _loss(against) - worst_if_nan(_loss(run))


def make_columns(case: Case, arm: str) -> dict[str, list[float]]:
    """All scores of a variant, and its gains over others."""
    columns = case.numbers(arm)
    columns["seconds"] = [run.seconds for run in case.runs[arm]]
    if arm == PLAIN:
        return columns
    columns[GAIN] = case.compare(arm, PLAIN, _gain)
    rival = RIVALS.get(case.settings["trained"], {}).get(arm)
    if rival in case.runs:
        columns[f"gain over {rival}"] = case.compare(arm, rival, _gain)
    return columns


def _by_validation(run: Run) -> float:
    return _loss(run, "validation") if "validation" in run.values else 0.0


COMPARISON = Comparison(
    GROUP,
    (PLAIN, CALIBRATED),
    _by_validation,
    make_columns,
    GAIN,
    "gain over plain, nats per token\n(of Devign: accuracy)",
    0,
)


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if calibrated heads gain before and after training, over the plain model and over scaled heads."""
    claims = {
        "with nothing trained, over the plain model": rows.find(GAIN, arm=CALIBRATED, trained=NOTHING),
        f"with {NUMBERS} trained, over as many factors": rows.find(f"gain over {ALL_SCALED}"),
        "with everything trained, over the plain model": rows.find(GAIN, arm=CALIBRATED, trained=EVERYTHING),
        "with everything trained, over the same heads scaled": rows.find(f"gain over {SCALED}", arm=CALIBRATED),
        "with LoRA, over LoRA alone": rows.find(GAIN, arm=CALIBRATED, trained=LORA_TRAINED),
    }
    parts = []
    for words, gains in claims.items():
        if gains:
            wins = gains.negated().below(0)
            parts.append(f"{words}, in {wins} of {len(gains)} cases (a loss in {gains.below(0)})")
    compared = Rows(row for gains in claims.values() for row in gains).negated()
    sentence = f"Calibrated heads gain significantly: {'; '.join(parts)}."
    over_plain = rows.find(GAIN, arm=CALIBRATED)
    findings = [_finding(rows, row) for row in over_plain]
    of_text = Rows(row for row in over_plain if row.settings["task"] != DEVIGN).by("trained")
    answer = "gain over the plain model, nats per token: " + ", ".join(
        f"{of_text[trained].span('+.3f')} with {trained} trained"
        for trained in (NOTHING, EVERYTHING, LORA_TRAINED)
        if trained in of_text
    )
    for gain in over_plain.find(GAIN, task=DEVIGN):
        answer += f", {100 * gain.mean:+.2f} percentage points of accuracy on Devign"
    return Conclusion(compared.judge(0), answer, sentence + compared.undecided(0), tuple(findings))


def _finding(rows: Rows, calibrated: Row) -> str:
    """All variants of a case."""
    case = {name: calibrated.settings[name] for name in GROUP}
    factor, unit = (100, "percentage points") if case["task"] == DEVIGN else (1, "nats per token")
    heads = rows.mean("chosen heads", **calibrated.settings)
    variants = []
    for row in rows.find(GAIN, **case):
        arm = row.settings["arm"]
        text = f"{arm} {row.scaled(factor).text('+.4f' if factor == 1 else '+.2f')}"
        numbers = rows.mean("numbers", **case, arm=arm)
        variants.append(f"{text}, {numbers:,.0f} numbers" if case["trained"] == NUMBERS else text)
    text = (
        f"{case['model']}, {case['task']}, {100 * case['share']:g} %, {case['trained']} trained: {heads:.0f} heads "
        f"chosen; gains over plain in {unit}: {'; '.join(variants)}"
    )
    for arm, rival in RIVALS.get(case["trained"], {}).items():
        for row in rows.find(f"gain over {rival}", **case, arm=arm):
            text += f"; {arm} over {rival} {row.scaled(factor).text('+.4f' if factor == 1 else '+.2f')}"
    return text


EXPERIMENT = Experiment(
    name="calibrate",
    claim="A pretrained model patched as `calibrate` says is better on text of the same kind before anything is "
    "trained, and stays better after training, also than the same heads merely scaled.",
    published="None: the paper trains its models from scratch. Without RSA, CodeBERT is reported at 62.08 % "
    "accuracy on all of Devign (CodeXGLUE).",
    remark="Every control has the heads and gates of the calibrated model, or as many: random heads have random REMs "
    "of the same shares; no recurrence has P = 0, so that gates only damp attention; scaled heads have a learned "
    "factor in place of a REM. The smallest LoRA and IA3 are PEFT's with their fewest parameters. Beside LoRA of rank "
    "8 (trained: lora), whose learning rates are higher, gates and rates have a parameter_scale of 5, which was "
    "chosen on the first two seeds of the quick size.",
    seeds={"toy": 2, "quick": 4, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=COMPARISON.draw,
    summarise=COMPARISON.summarise,
    parts=(*GROUP, "arm"),
    search_by=_by_validation,
)
