"""The choice of `defaults` against the plain model and a convolution, on held-out seeds, sizes and texts.

The protocol was written before the runs:

1. *Cases*, below: byte models of 1M for 400 steps, which is 1.6 bytes a parameter, and Transformer-XL for 2,000.
2. *Seeds* are others than those of `defaults`. Learning rates are searched for each variant with the first one, by the
   validation text, until the best has been tried from both sides; the others run at that rate.
3. *Scores* are of a test text, which no choice depends on. Intervals are over seeds and over the parts of that text.
   (Over the parts since a first run of Transformer-XL, which was then run again.)
4. The claim holds if RSA is significantly better than the plain model in every case, and better than the convolution
   in the mean over the seeds. RSA has three numbers a head, the convolution four, and both a gate a layer.
"""

import statistics
from dataclasses import replace
from typing import Any

import torch

from experiments import byte_models, language_model
from experiments.byte_counts import score_counts
from experiments.byte_models import SHAPES, TEST_PARTS, bits_by_part, bits_per_byte, train_on_bytes
from experiments.corpora import read_corpus, read_part, training_blocks
from experiments.runner.comparison import Comparison, all_measured, compare_variants, difference_by_part
from experiments.runner.experiment import Size, combinations
from experiments.runner.fit import count_parameters, default_device
from experiments.runner.summary import Conclusion, Rows, Settings, Values, weakest
from experiments.variants import CONVOLUTION, DEFAULT, make_variant

ARMS = ("plain", CONVOLUTION, DEFAULT)
COUNTS = "byte counts"  # of what byte models read; they have no learning rate
TRANSFORMER_XL = "transformer-xl"
# Model, text, steps.
CASES: dict[Size, list[tuple[str, str, int]]] = {
    "toy": [("llama of 0.03M", "python", 10), (TRANSFORMER_XL, "python", 10)],
    "quick": [("gpt2 of 0.1M", "enwik8", 400), ("llama of 0.1M", "enwik8", 400)],
    "full": [
        *((f"{family} of 1M", text, 400) for text in ("wikitext-2", "enwik8") for family in ("gpt2", "llama")),
        *((TRANSFORMER_XL, text, 2000) for text in ("text8", "enwik8")),
    ],
}
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SCORED_BYTES: dict[Size, int] = {"toy": 2_000, "quick": 200_000, "full": 200_000}  # of either text
VALIDATION, TEST, PARTS, PARAMETERS = "validation", "test", "test by part", "parameters"
OVER_PLAIN, OVER_CONVOLUTION = "test, bits per byte − plain", f"test, bits per byte − {CONVOLUTION}"
GROUP = ("model", "text", "steps")
PART_OF = " MB of "  # in the name of a text
EVERY = 200  # steps between the evaluations of early stopping


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Cases × variants × learning rates × seeds."""
    return [
        {**dict(zip(GROUP, case, strict=True)), "scored": SCORED_BYTES[size], **each}
        for case in CASES[size]
        for each in combinations(arm=ARMS, learning_rate=RATES, seed=range(seeds)) + counted(case[0], seeds)
    ]


def counted(model: str, seeds: int) -> list[dict[str, Any]]:
    """The runs of counts beside those of a model."""
    arms = () if model == TRANSFORMER_XL else (COUNTS,)
    return combinations(arm=arms, learning_rate=(0.0,), seed=range(seeds))


def measure(settings: Settings) -> Values:
    """Bits per byte, or per character of text8, of the validation and of the test text.

    On a text such as `0.1 MB of wikitext-2`, a byte model is trained over as many epochs as it gains from, with early
    stopping by the validation text.
    """
    arm, rate, seed, steps = (settings[name] for name in ("arm", "learning_rate", "seed", "steps"))
    torch.manual_seed(seed)
    evaluated: list[float] = []
    model: Any
    validation: Any
    test: Any
    text: Any
    if settings["model"] == TRANSFORMER_XL:
        segments = (language_model.SEGMENT, language_model.BATCH)
        train, validation, test, symbols = language_model.read_segments(
            settings["text"], *segments, settings["scored"]
        )
        plain = language_model.build(TRANSFORMER_XL, symbols, "plain")
        model = make_variant(arm, plain, 2 * language_model.SEGMENT).to(default_device())
        language_model.train_on_segments(model, train, rate, steps)
    else:
        family, _, size = settings["model"].split()
        shape = SHAPES[size]
        megabytes, _, corpus = settings["text"].rpartition(PART_OF)
        if megabytes:
            text = read_part(corpus, float(megabytes), settings["scored"], shape.block, seed)
            training = {"evaluations": steps // EVERY, "early_stopping": True}
        else:
            text = read_corpus(corpus, 10**9, settings["scored"], shape.block)
            training = {"evaluations": 0}
        validation, test = text.validation, text.test
        if arm == COUNTS:
            read = training_blocks(text).token_ids[: None if megabytes else steps * shape.batch * shape.block]
            score, parts = score_counts(read, text.validation.token_ids, text.test.token_ids, TEST_PARTS)
            return {VALIDATION: score, TEST: statistics.fmean(parts), PARTS: parts}
        model = make_variant(arm, byte_models.build(family, shape), shape.block).to(default_device())
        evaluated = train_on_bytes(model, text, shape, learning_rate=rate, steps=steps, seed=seed, **training)
    parts = bits_by_part(model, test)
    scores = {VALIDATION: bits_per_byte(model, validation), TEST: statistics.fmean(parts), PARTS: parts}
    return {**scores, PARAMETERS: float(count_parameters(model)), "evaluations": float(len(evaluated))}


COMPARISON = Comparison(
    GROUP,
    ("plain", CONVOLUTION, DEFAULT),
    lambda run: float(run.values[VALIDATION]),
    {
        **all_measured(VALIDATION, TEST, PARAMETERS, "learning_rate"),
        OVER_PLAIN: difference_by_part((CONVOLUTION, DEFAULT), "plain", PARTS),
        OVER_CONVOLUTION: difference_by_part((DEFAULT,), CONVOLUTION, PARTS),
    },
    judged=(OVER_PLAIN,),
    of_arm=DEFAULT,
    listed=(TEST, OVER_CONVOLUTION),
    shown=OVER_PLAIN,
    label="bits per byte of the test text, over plain",
    line=0,
)


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if RSA is better than plain significantly, and than the convolution in the mean, in every case."""
    found, over_convolution = COMPARISON.conclude(rows), rows.find(OVER_CONVOLUTION)
    ahead = sum(row.mean <= 0 for row in over_convolution)
    return replace(
        found,
        verdict=weakest(found.verdict, "confirmed" if ahead == len(over_convolution) else "not confirmed"),
        answer=f"{found.answer}; {OVER_CONVOLUTION} {over_convolution.span('+.3f')}",
        sentence=f"{found.sentence} Ahead of a convolution in the mean in {ahead} of {len(over_convolution)} cases.",
    )


EXPERIMENT = compare_variants(
    COMPARISON,
    name="confirmation",
    claim="A model with the RSA heads of RSAConfig.from_scratch ends better than the same model without them, and "
    "better than with a convolution over four tokens in their place.",
    published="Nothing on a convolution. The paper compares with learned Toeplitz matrices: text8, 1.183 and 1.164.",
    remark="The protocol is in experiments/confirmation.py. Scores are of at least 200,000 bytes of a test text.",
    seeds={"toy": 2, "quick": 3, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    parts=(*GROUP, "arm"),
    revision=2,
)
