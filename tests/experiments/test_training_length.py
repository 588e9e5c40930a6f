"""The experiment `training-length`: one run gives the score of every length, and what RSA saves at each."""

import math

import pytest
import torch
from transformers import get_wsd_schedule

from experiment_runs import Lookup, finished
from experiments.byte_models import SHAPES, build
from experiments.corpora import read_corpus
from experiments.runner.fit import batch_loss, fit
from experiments.training_length import (
    EXPERIMENT,
    RATIO,
    RECALLED,
    SAVED,
    key_value_rows,
    recalled_pairs,
    train_lengths,
)
from experiments.variants import make_variant
from rsa_hf import param_groups
from rsa_hf.tasks.text_scores import evaluate_language_model

SHAPE, RATE = SHAPES["0.03M"], 1e-2


def model():
    torch.manual_seed(0)
    return make_variant("rsa", build("llama", SHAPE), SHAPE.block)


def test_every_length_scores_as_a_run_of_its_own_with_the_same_schedule():
    text = read_corpus("python", 100_000, 2_000, SHAPE.block)
    lengths = [40, 60, 75]
    scores, trained = train_lengths(model(), text, SHAPE, lengths, learning_rate=RATE, seed=3)
    for length, found in zip(lengths, scores, strict=True):
        alone = model()
        optimizer = torch.optim.AdamW(param_groups(alone, RATE, weight_decay=0.01), fused=True)
        schedule = get_wsd_schedule(optimizer, 2, length // 5, length, warmup_type="linear", decay_type="linear")
        fit(batch_loss(alone, text.train, SHAPE.batch, 3), optimizer, length, model=alone, schedule=schedule)
        assert found == pytest.approx(evaluate_language_model(alone, text.validation, 32)["bits_per_byte"], abs=1e-6)
    assert scores == sorted(scores, reverse=True)
    assert evaluate_language_model(trained, text.validation, 32)["bits_per_byte"] == scores[-1]


def runs(arm, doublings=0.0):
    """Scores 3 − log₂ tokens / 10, from 1 to 8 tokens, as if trained with `doublings` more; three seeds differ."""
    shared = {"corpus": "python", "model": "0.03M", "family": "llama", "longest": 8.0, "learning_rate": RATE}
    tokens = [1.0, 2.0, 4.0, 8.0]
    values = {"final": 1.0, "tokens": tokens, "tokens per parameter": tokens, RECALLED: 0.5 + doublings / 10}
    curves = [[3 - (math.log2(n) + doublings) / 10 + seed / 1000 for n in tokens] for seed in range(3)]
    return [
        finished({**shared, "arm": arm, "seed": seed}, {**values, "bits per byte": curve})
        for seed, curve in enumerate(curves)
    ]


def test_savings_are_the_tokens_to_the_same_score():
    rows = EXPERIMENT.summarise([*runs("plain"), *runs("rsa", doublings=1.5)])
    ratios, saved = rows.find(RATIO), rows.find(SAVED)
    # 1.5 doublings; the least length is an upper bound, because the shortest training is better already.
    assert [row.mean for row in ratios] == pytest.approx([1.0, 0.5, 2**-1.5, 2**-1.5])
    assert [row.mean for row in saved] == pytest.approx([0.15] * 4)


@pytest.mark.parametrize(("doublings", "verdict"), [(1.5, "confirmed"), (-1.0, "not confirmed")])
def test_the_verdict_is_on_the_longest_training(doublings, verdict):
    rows = EXPERIMENT.summarise([*runs("plain"), *runs("rsa", doublings)])
    conclusion = EXPERIMENT.conclude(rows)
    assert conclusion.verdict == verdict
    assert "llama of 0.03M at 8 tokens per parameter" in conclusion.sentence


# --- recall -------------------------------------------------------------------------------------------------------


def test_every_asked_key_has_the_value_of_its_pair():
    tokens, labels = key_value_rows(20, 48, torch.Generator().manual_seed(0))
    for row, asked in zip(tokens.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[:24:2], row[1:24:2], strict=True))
        assert len(pairs) == 12 and pairs == dict(zip(row[24::2], row[25::2], strict=True))
        assert asked[:24] == [-100] * 24 and asked[24::2] == [-100] * 12 and asked[25::2] == row[25::2]


@pytest.mark.parametrize("knows", [True, False])
def test_recalled_pairs_are_those_that_the_model_names(knows):
    model = Lookup(SHAPE.block // 32, 256, knows)
    assert recalled_pairs(model, SHAPE, learning_rate=0.0, steps=1, seed=0) == knows
