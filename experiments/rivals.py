"""RSA against other positions and other short memories, on a GPT-2 and a Llama trained from scratch.

Each rival has its best learning rate, found by the same search, and scores are of a test text, as in `confirmation`.
GPT-2 has learned positions, which are slow to learn: rotary, sinusoidal or no positions with linear biases in their
place, and the memories of `variants.py`, say how much of RSA's gain is a matter of positions, and how much anything
that passes on the last tokens gains too. The quick size trains on about three bytes a parameter. The full size has the
same models at 25, or on a small part of the text over as many epochs as they gain from (early stopping, no dropout),
and larger ones. The plain model and the best rival of the quick size run first, which was decided before.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from experiments import byte_models, confirmation
from experiments.byte_models import SHAPES, amount_until
from experiments.confirmation import COUNTS, GROUP, PARAMETERS, PART_OF, PARTS, RATES, SCORED_BYTES, TEST, VALIDATION
from experiments.runner.comparison import Comparison, all_measured, compare_variants, difference_by_part
from experiments.runner.experiment import Size, combinations
from experiments.runner.fit import default_device, step_time_ratio
from experiments.runner.summary import Conclusion, Row, Rows, Settings, Values
from experiments.variants import (
    CONVOLUTION,
    DEFAULT,
    LINEAR_BIASES,
    OF_GPT2,
    PAPER,
    SHIFT,
    TOEPLITZ,
    UNPLACED,
    make_variant,
)

MEMORIES, RSA = (SHIFT, CONVOLUTION, TOEPLITZ), (PAPER, DEFAULT, UNPLACED)
RIVALS = ("plain", LINEAR_BIASES, *OF_GPT2, *MEMORIES)
SIZES = (0.1, 0.3, 1.0)  # of parts of the text, in MB
CASES: dict[Size, list[tuple[str, str, int]]] = {
    "toy": [("gpt2 of 0.03M", "python", 10)],
    "quick": [(f"{family} of 0.1M", "wikitext-2", 400) for family in ("gpt2", "llama")],
    "full": [
        ("gpt2 of 0.1M", "wikitext-2", 3000),
        ("llama of 0.1M", "wikitext-2", 3600),
        *((f"{family} of 0.1M", f"{size}{PART_OF}wikitext-2", 6000) for size in SIZES for family in ("gpt2", "llama")),
        *((f"{family} of 1M", text, 400) for text in ("wikitext-2", "enwik8") for family in ("gpt2", "llama")),
    ],
}
TIME, OVER_PLAIN, BEHIND_RSA = "time of a step / plain", "test, bits per byte − plain", "test, bits per byte − RSA"


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Cases × variants × learning rates × seeds; rotary and sinusoidal positions are for GPT-2."""
    return [
        {**dict(zip(GROUP, case, strict=True)), "scored": SCORED_BYTES[size], **each}
        for case in CASES[size]
        for rates in [(3e-5, 1e-4, *RATES, 1e-1, 3e-1) if PART_OF in case[1] else RATES]
        for each in combinations(arm=(*RIVALS, *RSA), learning_rate=rates, seed=range(seeds))
        + confirmation.counted(case[0], seeds)
        if each["arm"] not in OF_GPT2 or case[0].startswith("gpt2")
    ]


def measure(settings: Settings) -> Values:
    """The scores of `confirmation`, and the time of a step relative to the plain model's."""
    if settings["arm"] == COUNTS:
        return confirmation.measure(settings)
    family, _, size = settings["model"].split()
    shape = SHAPES[size]
    plain, model = (byte_models.build(family, shape).to(default_device()) for _ in range(2))  # type: ignore[arg-type]
    model = make_variant(settings["arm"], model, shape.block).to(default_device())
    tokens = torch.randint(256, (shape.batch, shape.block), device=default_device())
    return confirmation.measure(settings) | {TIME: step_time_ratio(model, plain, tokens)}


COMPARISON = Comparison(
    GROUP,
    ("plain", DEFAULT),
    lambda run: float(run.values[VALIDATION]),
    {
        **all_measured(TEST, VALIDATION, PARAMETERS, "learning_rate", TIME),
        OVER_PLAIN: difference_by_part((*RIVALS[1:], *RSA), "plain", PARTS),
        BEHIND_RSA: difference_by_part(RIVALS, DEFAULT, PARTS),
    },
    judged=(BEHIND_RSA,),
    higher_is_better=True,
    listed=(TEST, PARAMETERS, TIME),
    shown=OVER_PLAIN,
    label="bits per byte of the test text, over plain",
    line=0,
)


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if RSA's default is significantly better than every rival in every case."""
    best = [best_rival(rows, row.pick(GROUP)) for row in rows.find(TEST, arm=DEFAULT)]
    over_best = ", ".join(f"{-row.mean:+.3f} ({row.settings['arm']})" for row in best)
    found = COMPARISON.conclude(rows)
    findings = (*found.findings, *text_for_equal_scores(rows))
    return replace(found, answer=f"bits per byte over the best rival {over_best}", findings=findings)


def text_for_equal_scores(rows: Rows) -> Iterator[str]:
    """For each part of a text, how much of it the plain model needs for RSA's score, interpolated over log size."""
    parts = Rows(row for row in rows.find(TEST) if PART_OF in row.settings["text"])
    for row in parts.find(TEST, arm=DEFAULT):
        of_model = parts.find(TEST, arm="plain", model=row.settings["model"])
        plain = sorted((float(other.settings["text"].split()[0]), other.mean) for other in of_model)
        logs = [math.log(size) for size, _ in plain]
        needed = math.exp(amount_until(row.mean, logs, [score for _, score in plain]))
        size = f"{needed:.2f} MB" if math.isfinite(needed) else f"more than {plain[-1][0]} MB"
        yield f"{row.settings['model']}, {row.settings['text']}: the plain model needs {size} for the score of RSA"


def best_rival(rows: Rows, case: Settings, arms: Sequence[str] = RIVALS) -> Row:
    """By how much the best of some rivals, by the validation text of a case, is behind RSA on its test text."""
    scores = [row for row in rows.find(VALIDATION, **case) if row.settings["arm"] in arms]
    best = min(scores, key=lambda row: row.mean).settings["arm"]
    return rows.find(BEHIND_RSA, **case, arm=best)[0]


EXPERIMENT = compare_variants(
    COMPARISON,
    name="rivals",
    claim="A GPT-2 or a Llama with the RSA heads of RSAConfig.from_scratch ends better than with other positions, a "
    "learned Toeplitz matrix, a convolution over four tokens or a token shift.",
    published="text8, bits per character: 1.164 with REMs and 1.183 with a learned Toeplitz matrix (section 4).",
    remark="Scores are of 200,000 bytes of a test text. Rivals that replace the REMs are computed with a dense P, so "
    "their time of a step says nothing of what they could cost.",
    seeds={"toy": 2, "quick": 5, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    parts=(*GROUP, "arm"),
)
