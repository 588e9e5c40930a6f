"""Sample efficiency: variants, learning curves, and a verdict that follows the figures."""

import math
from dataclasses import replace

import pytest
import torch

from experiments.runs import conclude, fake_runs, finished, zero_rems
from rsa_hf import RSAConfig, patch_model
from rsa_hf.experiments import sample_efficiency
from rsa_hf.experiments.byte_models import SHAPES, Curve, build
from rsa_hf.experiments.runner.fit import step_time_ratio
from rsa_hf.experiments.sample_efficiency import EXPERIMENT, RATIO, TIME
from rsa_hf.experiments.variants import KERNEL, VARIANTS, LearnedLags, make_variant
from rsa_hf.heads import RSAHeads, heads_of

SHAPE = SHAPES["0.03M"]
IDS = torch.arange(40).remainder(7)[None]


def plain(seed=0):
    torch.manual_seed(seed)
    return build("llama", SHAPE).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_causal_and_trains_all_parameters(variant):
    model = make_variant(variant, plain(), SHAPE.block).eval()
    changed = IDS.clone()
    changed[0, 30:] = 9
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=changed).logits[:, :30], logits(model)[:, :30])
    model(input_ids=IDS, labels=IDS).loss.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    assert (variant == "plain") == torch.equal(logits(model), logits(plain()))


def test_learned_lags_start_as_the_rem():
    free, rem = make_variant("learned toeplitz", plain(), SHAPE.block), make_variant("rsa", plain(), SHAPE.block)
    torch.testing.assert_close(logits(free), logits(rem))


@pytest.mark.parametrize("longest", [1, KERNEL, KERNEL + 1, 50])
def test_learned_lags_against_a_loop(longest):
    """Values and gradients, at lengths below and above the longest lag."""
    heads = RSAHeads(RSAConfig.from_scratch(4).layer_plans([4])[0])
    lags = LearnedLags(heads, longest)
    for T in (1, 3, 7):
        gate = torch.sigmoid(lags.mu * heads.plan.parameter_scale)
        attention = torch.randn(2, T, 4, 3)
        value = torch.randn(2, 4, T, 3, requires_grad=True)
        product = torch.zeros(2, T, 4, 3)
        for t in range(T):
            for s in range(max(0, t - longest), t):
                product[:, t] = product[:, t] + lags.f[:, t - s - 1, None] * value[:, :, s]
        expected = (1 - gate) * attention + gate * product
        found = lags(attention, value, None)
        torch.testing.assert_close(found, expected)
        wanted = (value, lags.f, lags.mu) if T > 1 else (lags.mu,)
        for got, want in zip(*(torch.autograd.grad(x.square().sum(), wanted) for x in (found, expected)), strict=True):
            torch.testing.assert_close(got, want)


def test_without_softmax_the_gate_stays_open():
    model = make_variant("no softmax", plain(), SHAPE.block)
    gates = [heads.rates()["gate"] for m in model.modules() if (heads := heads_of(m)) is not None]
    assert gates
    assert all(bool((gate == 1).all()) for gate in gates)
    assert not [name for name, p in model.named_parameters() if name.endswith("rsa.mu") and p.requires_grad]


def test_without_recurrence_is_rsa_with_a_rem_of_zeros(monkeypatch):
    damped = logits(make_variant("no recurrence", plain(), SHAPE.block))
    zero_rems(monkeypatch)
    torch.testing.assert_close(damped, logits(make_variant("rsa", plain(), SHAPE.block)))


def test_alibi_is_a_bias_on_the_scores():
    """Against attention written out."""
    model = make_variant("alibi", plain(), SHAPE.block)
    assert model.bias.shape == (1, SHAPE.heads, SHAPE.block, SHAPE.block)
    assert model.bias[0, 0, 5, 3] == pytest.approx(-2 * 2 ** (-8 / SHAPE.heads))
    assert model.bias[0, -1, 5, 4] == pytest.approx(-(2**-8))
    assert bool((model.bias[0, :, 3, 4] < -1e30).all())


def test_the_time_of_a_step_is_beside_another_models():
    shallow, deep = plain(), build("llama", replace(SHAPE, layers=6 * SHAPE.layers))
    assert step_time_ratio(deep, shallow, IDS) > 2
    assert step_time_ratio(shallow, deep, IDS) < 0.5
    assert all(parameter.grad is None for parameter in deep.parameters())


def test_tokens_until():
    curve = Curve([100.0, 200.0, 300.0], [4.0, 3.0, 3.5])
    assert curve.tokens_until(5.0) == 100
    assert curve.tokens_until(3.5) == 150
    assert curve.tokens_until(3.0) == 200
    assert curve.tokens_until(2.9) == math.inf
    assert [curve.score_at(tokens) for tokens in (50, 150, 300, 400)] == [4.0, 3.5, 3.5, 3.5]


def runs_of(**scores):
    """Runs with these curves, one point for every 10 bytes, and a step time of 1.2 for RSA."""
    runs = []
    for variant, curve in scores.items():
        [run] = fake_runs("sample-efficiency", variant.replace("_", " "), [curve[-1]])
        tokens = [10.0 * (point + 1) for point in range(len(curve))]
        runs.append(replace(run, values={**run.values, "tokens": tokens, "bits per byte": list(curve)}))
        runs[-1].values[TIME] = 1.2
    return runs


def test_the_finding_of_a_case():
    runs = runs_of(plain=(6, 5, 4, 3.0), rsa=(5.5, 3.5, 3.0, 2.0), published=(6, 4, 3.5, 3.0), alibi=(6, 5, 4, 3.5))
    rows = EXPERIMENT.summarise(runs)
    assert rows.mean(RATIO, arm="rsa") == pytest.approx(30 / 40)
    # 5 is a quarter of the way from 5.5 to 3.5.
    assert rows.mean("tokens / plain, half way", arm="rsa") == pytest.approx(12.5 / 20)
    assert rows.mean("wall-clock / plain", arm="rsa") == pytest.approx(0.9)
    conclusion = conclude("sample-efficiency", runs)
    assert conclusion.findings[0].endswith(
        "10 bytes of python, read 4 times: 0.75 (one seed) of the plain model's tokens and 0.90 of its time; goal 0.4 "
        "not met: after that share of the tokens +1.300 bits per byte relative to the plain model's final score; 0.62 "
        "of the tokens to the plain model's score half way; tokens of other variants: published 1.00 (one seed), alibi "
        "not reached with every seed"
    )
    assert "0.4 for llama, are met in 0." in conclusion.sentence
    assert "has not run in 1: there the verdict is on tokens alone" in conclusion.sentence
    more = [*runs, *runs_of(no_recurrence=(6, 5, 4, 2.5))]
    assert (
        "; RSA ends -0.500 bits per byte relative to no recurrence" in conclude("sample-efficiency", more).findings[0]
    )


def test_rates_on_the_edge_of_the_search_are_named():
    rates = (1e-4, 1e-3, 1e-2)
    inside = [fake_runs("sample-efficiency", "plain", [3.0 + (rate != 1e-3)], rate=rate) for rate in rates]
    at_the_end = [fake_runs("sample-efficiency", "rsa", [2 - rate], rate=rate) for rate in rates]
    words = "; best at the lowest or highest learning rate tried: rsa"
    assert conclude("sample-efficiency", *inside, *at_the_end).findings[0].endswith(words)
    # Of two rates one is always at an end, which says nothing.
    assert "rate tried" not in conclude("sample-efficiency", *inside[:2], *at_the_end[:2]).findings[0]


@pytest.mark.parametrize("scores", [(6, 4, 3, 2.5), (6, 3, 3.5, 4.0), (3, 4, 5, 6.0)])
def test_a_variant_like_the_plain_model_needs_as_many_tokens(scores):
    # It gets worse again, and was where it ends long before.
    runs = runs_of(plain=scores, rsa=scores)
    rows = EXPERIMENT.summarise(runs)
    assert rows.mean(RATIO) == rows.mean("tokens / plain, half way") == 1
    assert conclude("sample-efficiency", runs).verdict == "not confirmed"


@pytest.mark.parametrize(
    ("variant", "heads", "nu", "theta"),
    [("published", SHAPE.heads // 2, (1, 2), (math.pi / 4,) * 2), ("rsa", SHAPE.heads, (0, 0), (0, math.pi))],
)
def test_plans_of_the_variants(variant, heads, nu, theta):
    modules = make_variant(variant, plain(), SHAPE.block).modules()
    plan = next(found.plan for module in modules if (found := heads_of(module)))
    assert (plan.num_rsa_heads, plan.nu_init, plan.theta_init) == (heads, nu, theta)


def toy(make, monkeypatch, rate=1e-2):
    monkeypatch.setattr(sample_efficiency, "make_variant", make)
    grid = [
        settings
        for settings in EXPERIMENT.grid("toy", 1)
        if (settings["family"], settings["learning_rate"]) == ("gpt2", rate) and settings["arm"] in ("plain", "rsa")
    ]
    return conclude("sample-efficiency", [finished(settings, EXPERIMENT.measure(settings)) for settings in grid])


def test_a_rem_that_is_switched_off_wins_nothing(monkeypatch):
    assert toy(make_variant, monkeypatch).verdict != "not confirmed"

    def broken(variant, model, longest):
        if variant == "rsa":
            patch_model(model, RSAConfig(gate_init=-math.inf))
            for module in model.modules():
                if (heads := heads_of(module)) is not None:
                    heads.requires_grad_(False)
        return model

    conclusion = toy(broken, monkeypatch)
    assert conclusion.verdict == "not confirmed"
    assert "1.00 (one seed) of the plain" in conclusion.findings[0]


def test_a_rem_of_zeros_loses(monkeypatch):
    assert toy(make_variant, monkeypatch, rate=3e-3).verdict != "not confirmed"
    zero_rems(monkeypatch)
    assert toy(make_variant, monkeypatch, rate=3e-3).verdict == "not confirmed"
