"""Calibration: pretrained models with the heads that `calibrate` chooses, against controls that could explain a gain.

Every variant is scored with nothing trained, and after training: the numbers of its heads alone, with the base frozen;
everything; or LoRA beside it. The model is calibrated on rows of the data that it is then trained on. Each seed has
another portion of the training text, other rows to calibrate on, and another part of the test text. With the first
seed every variant is trained at every learning rate, and with the others at the one with the best validation score.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.calibrate.arms import (
    ADAPTERS_ON_ROWS,
    ALL_SCALED,
    CALIBRATED,
    CALIBRATED_BIAS,
    FACTORS_ON_ROWS,
    LORA,
    ON_THE_ROWS,
    PLAIN,
    SCALED,
    TOKEN_BIAS,
    TRIGRAMS,
)
from experiments.calibrate.training import EVERYTHING, LORA_TRAINED, NOTHING, NUMBERS, measure
from experiments.runner.comparison import Case, Column, Comparison, all_measured, compare_variants, compared
from experiments.runner.experiment import Size, combinations
from experiments.runner.summary import Run, Settings, worst_if_nan
from experiments.variants import NO_RECURRENCE

ALL = 10**9  # more than any data set has
# length: tokens in a row; batch: rows in a step; rows: to calibrate on; scored: bytes or functions of the test split;
# most: bytes that count as all training text; pretraining_steps: of a byte-level model.
NAMES = ("model", "task", "length", "batch", "rows", "scored", "most", "pretraining_steps")
Rates = Mapping[str, tuple[float, ...]]  # by what is trained; with nothing, of what is trained on the rows
Part = tuple[float, str, int, Sequence[str]]  # share of the data, what is trained, steps, variants
Plan = tuple[tuple[Any, ...], Rates, list[Part]]  # of a model and task; the first are the settings above


# Of models from packages; LoRA needs far higher ones than gates do.
_PACKAGED_RATES: Rates = {
    NOTHING: (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    NUMBERS: (3e-3, 1e-2, 3e-2),
    EVERYTHING: (1e-4, 3e-4),
    LORA_TRAINED: (1e-3, 3e-3),
}
_BYTE_RATES: Rates = dict.fromkeys(_PACKAGED_RATES, (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1))
# A model that is trained longer before is trained on at lower rates.
_LOWER_RATES: Rates = dict.fromkeys(
    _PACKAGED_RATES, (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
)
_TOY_RATES: Rates = dict.fromkeys(_PACKAGED_RATES, (1e-3,))

_UNTRAINED = (PLAIN, NO_RECURRENCE, CALIBRATED, TOKEN_BIAS, CALIBRATED_BIAS)
_OF_EVERYTHING = (PLAIN, SCALED, CALIBRATED)


def _on_the_rows(share: float, steps: int) -> list[Part]:
    """Nothing trained but rivals on the rows to calibrate on."""
    return [(share, NOTHING, 0, _UNTRAINED), (share, NOTHING, steps, ADAPTERS_ON_ROWS)]


def _parts(share: float, on_rows: int, numbers: int, others: int) -> list[Part]:
    """All that is trained on a share of the data, with the steps on the rows, of a few numbers, and of the others."""
    return [
        *_on_the_rows(share, on_rows),
        (share, NUMBERS, numbers, (PLAIN, NO_RECURRENCE, ALL_SCALED, CALIBRATED, LORA)),
        (share, EVERYTHING, others, _OF_EVERYTHING),
        (share, LORA_TRAINED, others, (PLAIN, CALIBRATED)),
    ]


PLANS: dict[Size, list[Plan]] = {
    "toy": [(("llama-0.03M", "c", 64, 4, 24, 2_000, 20_000, 30), _TOY_RATES, _parts(1.0, 4, 4, 4))],
    "quick": [
        ((f"{family}-0.1M", "wikitext-2", 128, 8, 48, 20_000, ALL, 600), _BYTE_RATES, _parts(0.1, 24, 60, 60))
        for family in ("gpt2", "llama")
    ],
    "full": [
        *(
            (
                ("smollm2", task, 256, 2, 64, 20_000, ALL, 0),
                _PACKAGED_RATES,
                [*parts, (share, NOTHING, 128, (FACTORS_ON_ROWS,))],
            )
            for task, share, parts in (
                ("wikitext-2", 0.01, [*_parts(0.01, 128, 100, 50), (0.1, EVERYTHING, 100, _OF_EVERYTHING)]),
                ("c", 0.01, _on_the_rows(0.01, 128)),
                ("python", 0.1, _on_the_rows(0.1, 128)),
            )
        ),
        *(
            (
                (f"{family}-0.1M", "wikitext-2", 128, 8, 64, 200_000, ALL, steps),
                _LOWER_RATES,
                [*_parts(0.1, 32, 60, 60), (0.1, NOTHING, 0, (TRIGRAMS,))],
            )
            for family, steps in (("gpt2", 3000), ("llama", 3600))
        ),
    ],
}


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Models and texts × what is trained × variants × learning rates × seeds.

    Seeds change fastest: the first processes then calibrate for different seeds, and do not wait for each other.
    """
    return [
        {**dict(zip(NAMES, shared, strict=True)), "share": share, "trained": trained, "steps": steps, **each}
        for shared, rates, parts in PLANS[size]
        for share, trained, steps, variants in parts
        for each in combinations(arm=variants, learning_rate=rates[trained] if steps else (0.0,), seed=range(seeds))
    ]


# --- results ------------------------------------------------------------------------------------------------------

GROUP = ("model", "task", "share", "trained")
GAIN = "gain"  # over the plain model, in nats per token
# What calibrated heads have to beat beside the plain model, by what is trained.
RIVALS = {
    NOTHING: (NO_RECURRENCE, TOKEN_BIAS, *ON_THE_ROWS),
    NUMBERS: (NO_RECURRENCE, ALL_SCALED, LORA),
    EVERYTHING: (SCALED,),
    LORA_TRAINED: (),
}
OVER_RIVALS = {f"gain over {rival}": rival for rivals in RIVALS.values() for rival in rivals}


def _gain(run: Run, against: Run) -> float:
    """Of two runs from the same pretrained weights; the oldest groups of runs were stored without a digest of them."""
    if run.values.get("weights") != against.values.get("weights"):
        raise ValueError(f"{run.settings} and {against.settings} started from different weights. Run both again.")
    return float(against.values["score"]) - worst_if_nan(float(run.values["score"]))


def _gain_over(rival: str) -> Column:
    def column(case: Case, arm: str) -> list[Any] | None:
        arms = {CALIBRATED, CALIBRATED_BIAS} if rival == TOKEN_BIAS else {CALIBRATED}
        return compared(arms, rival, _gain)(case, arm) if rival in RIVALS[case.settings["trained"]] else None

    return column


COMPARISON = Comparison(
    GROUP,
    (PLAIN, CALIBRATED),
    lambda run: float(run.values.get("validation", 0)),  # with nothing trained there is none
    {
        **all_measured("score", "numbers", "validation", "chosen heads", "checked gain"),
        **all_measured("checked gain without recurrence", "learning_rate", "seconds"),
        GAIN: lambda case, arm: compared(case.runs.keys() - {PLAIN}, PLAIN, _gain)(case, arm),
        **{name: _gain_over(rival) for name, rival in OVER_RIVALS.items()},
    },
    judged=(GAIN, *OVER_RIVALS),
    of_arm=CALIBRATED,
    higher_is_better=True,
    listed=("numbers",),
    shown=GAIN,
    label="gain over plain, nats per token",
    line=0,
)


EXPERIMENT = compare_variants(
    COMPARISON,
    name="calibrate",
    claim="A pretrained model patched as `calibrate` says is better on text of the same kind before anything is "
    "trained, stays better after training, and than P = 0, heads merely scaled, and the smallest LoRA.",
    published="None: the paper trains its models from scratch.",
    remark="SmolLM2 is SmolLM2-135M-Instruct in four bits (Q4_1); where it is trained, but for rivals on the rows, "
    "it was calibrated before calibrate tried short memories with free lags. Models of bytes are pretrained "
    "five times as long, or six, at the full size; byte trigrams are counts of the text that they read. The "
    "token bias is fitted by counting, to the rows that the model is calibrated on; variants on the rows are "
    "trained on them. No recurrence has the heads and gates of the calibrated model with P = 0, so that "
    "gates only damp attention; scaled heads have a learned factor in place of a REM. Beside LoRA of rank 8 "
    "(trained: lora), whose learning rates are higher, gates and rates have a parameter_scale of 5, which "
    "was chosen on two seeds of GPT-2 and Llama of 0.1M on C.",
    seeds={"toy": 2, "quick": 4, "full": 5},
    grid=make_grid,
    measure=measure,
    parts=(*GROUP, "arm"),
)
