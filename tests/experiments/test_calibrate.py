"""The experiment `calibrate`: its variants against plain arithmetic, and what is calibrated on what."""

import math
from dataclasses import replace

import pytest
import torch

from experiment_runs import fake_runs
from experiments.byte_models import SHAPES, build
from experiments.calibrate import EXPERIMENT
from experiments.calibrate import arms as v
from experiments.variants import NO_RECURRENCE, patched_modules
from rsa_hf import HeadConfig, RSAConfig

HEADS = [(0, 1, "regular", 0.5, 0.2), (0, 3, "sin", 0.7, 0.1, 0.6), (1, 0, "cos", 0.6, 0.3)]
PLAN = RSAConfig(heads=[HeadConfig(*head) for head in HEADS])
LENGTH = 48


def llama():
    torch.manual_seed(0)
    return build("llama", SHAPES["0.03M"]).eval()


def logits(model):
    return model(input_ids=torch.arange(LENGTH)[None]).logits


@torch.no_grad()
@pytest.mark.parametrize("variant", [v.SCALED, v.ALL_SCALED, v.LORA, v.PLAIN, *v.ON_THE_ROWS])
def test_variants_without_recurrence_start_as_the_plain_model(variant):
    model = v.make_variant(variant, llama(), PLAN)
    torch.testing.assert_close(logits(model), logits(llama()), rtol=0, atol=1e-6)


def test_runs_from_different_weights_are_not_compared():
    def runs(arm, *weights):
        fake = fake_runs("calibrate", arm, (1.0, 1.1))
        return [replace(run, values={**run.values, "weights": [w]}) for run, w in zip(fake, weights, strict=True)]

    plain = runs("plain", 1.0, 2.0)
    assert EXPERIMENT.summarise([*plain, *runs("calibrated", 1.0, 2.0)])
    for others in (runs("calibrated", 1.0, 3.0), fake_runs("calibrate", "calibrated", (1.0, 1.1))):  # unknown ones
        with pytest.raises(ValueError, match="different weights"):
            EXPERIMENT.summarise([*plain, *others])


@torch.no_grad()
def test_factors_scale_attention():
    calibrated = v.make_variant(v.CALIBRATED, llama(), PLAN)
    assert not torch.equal(logits(calibrated), logits(llama()))
    # A factor of 1 − g is what gates do to attention without recurrence.
    scaled, damped = (v.make_variant(variant, llama(), PLAN) for variant in (v.SCALED, NO_RECURRENCE))
    for (_, heads), (_, of) in zip(patched_modules(scaled), patched_modules(calibrated), strict=True):
        heads.factor.copy_(-of.rates()["gate"] / heads.spec.layout.scale)
    torch.testing.assert_close(logits(scaled), logits(damped))
    tuned, plain = v.make_variant(v.FACTORS_ON_ROWS, llama(), PLAN), llama()
    factors, weights = (model.model.layers[0].self_attn for model in (tuned, plain))
    factors.q_proj.factor[1], factors.o_proj.factor[2] = 2, 1
    weights.q_proj.weight.view(4, -1, plain.config.hidden_size)[1] *= 3
    weights.o_proj.weight.view(plain.config.hidden_size, 4, -1)[:, 2] *= 2
    torch.testing.assert_close(logits(tuned), logits(plain))


@torch.no_grad()
def test_a_token_bias_is_how_much_more_often_tokens_occur_than_expected():
    model, rows = llama(), torch.randint(5, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    before = model(rows).logits
    expected = before[:, :-1].softmax(-1).sum((0, 1))
    bias = [math.log((int((rows[:, 1:] == i).sum()) + 1) / (float(expected[i]) + 1)) for i in range(256)]
    v.add_token_bias(model, [{"input_ids": rows[:2]}, {"input_ids": rows[2:]}])
    torch.testing.assert_close(model(rows).logits, before + torch.tensor(bias))
