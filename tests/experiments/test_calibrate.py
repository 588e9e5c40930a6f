"""The experiment `calibrate`: its variants against plain arithmetic, and what is calibrated on what."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiment_runs import fake_runs
from experiments.byte_models import SHAPES, build
from experiments.calibrate import EXPERIMENT, training
from experiments.calibrate import variants as v
from experiments.runner.files import CACHE
from experiments.variants import NO_RECURRENCE, patched_modules
from rsa_hf import HeadConfig, RSAConfig, patch_model, rem_matrix

PLAN = RSAConfig(
    heads=[
        HeadConfig(0, 1, "regular", 0.5, 0.2),
        HeadConfig(0, 3, "sin", 0.7, 0.1, 0.6),
        HeadConfig(1, 0, "cos", 0.6, 0.3),
    ]
)
LENGTH = 48


def llama():
    torch.manual_seed(0)
    return build("llama", SHAPES["0.03M"]).eval()


def logits(model):
    return model(input_ids=torch.arange(LENGTH)[None]).logits


@torch.no_grad()
@pytest.mark.parametrize("variant", [v.SCALED, v.ALL_SCALED, v.LORA, v.IA3, v.PLAIN])
def test_variants_without_recurrence_start_as_the_plain_model(variant):
    model = v.make_variant(variant, llama(), PLAN, LENGTH, 0)
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
def test_factors_start_as_the_calibrated_model_and_then_scale_attention():
    calibrated = v.make_variant(v.CALIBRATED, llama(), PLAN, LENGTH, 0)
    with_factors = v.make_variant(v.WITH_FACTORS, llama(), PLAN, LENGTH, 0)
    with_all = v.make_variant(v.WITH_ALL_FACTORS, llama(), PLAN, LENGTH, 0)
    for model in (with_factors, with_all):
        assert torch.equal(logits(model), logits(calibrated))
    assert not torch.equal(logits(calibrated), logits(llama()))
    # A factor that cancels 1 − g in front of attention is the same as adding g P V.
    scaled = v.make_variant(v.SCALED, llama(), PLAN, LENGTH, 0)
    damped = v.make_variant(NO_RECURRENCE, llama(), PLAN, LENGTH, 0)
    for model, factor in ((scaled, lambda g: -g), (with_factors, lambda g: 1 / (1 - g) - 1)):
        for (_, heads), (_, of) in zip(patched_modules(model), patched_modules(calibrated), strict=True):
            heads.factor.copy_(factor(of.rates()["gate"]) / heads.spec.parameter_scale)
    torch.testing.assert_close(logits(scaled), logits(damped))
    assert (logits(with_factors) - logits(calibrated)).abs().max() > 1e-3


def test_random_heads_have_the_shares_of_the_calibrated_ones():
    def shares(plan):
        found = []
        for h in plan.heads:
            free = None if h.free_lags is None else torch.tensor([h.free_lags])
            P = rem_matrix(h.kind, h.decay, h.theta, h.dilation, query_length=LENGTH, free_lags=free)
            found.append(h.gate * float(P[0, -1].abs().sum()))
        return sorted(found)

    model = llama()
    small = RSAConfig(heads=[replace(head, gate=head.gate / 20) for head in PLAN.heads])
    plans = [v._random_plan(model, small, LENGTH, seed) for seed in range(4)]
    for plan in plans:
        assert shares(plan) == pytest.approx(shares(small), rel=1e-4)
        patch_model(copy.deepcopy(model), plan)
    assert len({tuple((head.layer, head.head) for head in plan.heads) for plan in plans}) > 1
    assert all(head.gate <= v.WIDEST_GATE for head in v._random_plan(model, PLAN, LENGTH, 1).heads)


@pytest.mark.usefixtures("use_small_data")
def test_a_calibration_after_training_sees_a_trained_model_and_other_rows(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE, str(tmp_path))
    seen = []

    def calibration(model, batches, **_):
        seen.append((logits(model.eval()).detach(), torch.cat([batch["input_ids"] for batch in batches])))
        plan = PLAN if len(seen) == 2 else RSAConfig(heads=())
        found = {"config": plan.to_dict(), "gain": 0.1, "gain_error": 0.01, "gain_without_recurrence": 0.0}
        return SimpleNamespace(to_dict=lambda: found)

    monkeypatch.setattr(training, "run_calibration", calibration)
    [settings] = (
        each for each in EXPERIMENT.grid("toy", 1) if (each["arm"], each["trained"]) == (v.AFTER, "everything")
    )
    settings = {**settings, "share": 0.4}
    after = EXPERIMENT.measure(settings)
    plain = EXPERIMENT.measure({**settings, "arm": v.PLAIN})
    (untrained, first), (trained, second) = seen
    assert not torch.allclose(untrained, trained)
    assert not (first[:, None] == second).all(-1).any()
    assert (plain["chosen heads"], after["chosen heads"]) == (0, len(PLAN.heads))
    assert plain["score"] != after["score"] == pytest.approx(plain["score"], rel=0.2)
    # The calibration before training chose no heads, so this is the plain model.
    assert EXPERIMENT.measure({**settings, "arm": v.CALIBRATED}) == plain
