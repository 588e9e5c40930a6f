"""The experiment `sample-efficiency`: variants, learning curves and the verdict."""

import math
from dataclasses import replace

import pytest
import torch

from experiment_runs import conclude, fake_runs, finished, patch_with_shut_gates, zero_rems
from experiments import sample_efficiency
from experiments.byte_models import SHAPES, Curve, build
from experiments.runner.fit import step_time_ratio
from experiments.sample_efficiency import EXPERIMENT, RATIO, TIME
from experiments.variants import (
    CHANNEL_GATES,
    DILATED,
    HALF,
    KERNEL,
    LEARNED_START,
    ON_KEYS,
    ON_VALUES,
    PACE,
    TOKEN_GATES,
    TWO_REMS,
    VARIANTS,
    LearnedLags,
    make_variant,
)
from rsa_hf import RSAConfig
from rsa_hf.heads import RSAHeads, active_heads
from rsa_hf.ops.mask import AttentionMask

SHAPE = SHAPES["0.03M"]
IDS = torch.arange(40).remainder(7)[None]


def plain(seed=0):
    torch.manual_seed(seed)
    return build("llama", SHAPE).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_causal_and_trains_all_parameters(variant):
    model = make_variant(variant, plain(), SHAPE.block).eval()
    changed = IDS.clone()
    changed[0, 30:] = 9
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=changed).logits[:, :30], logits(model)[:, :30])
    model(input_ids=IDS, labels=IDS).loss.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    assert (variant == "plain") == torch.equal(logits(model), logits(plain()))


@pytest.mark.usefixtures("use_small_data")
def test_a_learned_start_is_that_of_a_model_with_another_seed(monkeypatch):
    seen = []

    def train(model, *_, seed, **__):
        seen.append((seed, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.125
        return Curve([1.0], [2.0])

    monkeypatch.setattr(sample_efficiency, "train_on_bytes", train)
    [settings, *_] = (each for each in EXPERIMENT.grid("toy", 1) if each["arm"] == LEARNED_START)
    EXPERIMENT.measure(settings)
    EXPERIMENT.measure({**settings, "arm": "rsa"})
    (other, before), (seed, start), (_, of_rsa) = seen
    assert (other, seed) == (1000, 0)
    assert any(".rsa." in name for name in start)
    for name, tensor in start.items():
        assert torch.equal(tensor, before[name] + 0.125 if ".rsa." in name else of_rsa[name])


def test_learned_lags_start_equal_to_the_rem():
    free, rem = make_variant("learned toeplitz", plain(), SHAPE.block), make_variant("rsa", plain(), SHAPE.block)
    torch.testing.assert_close(logits(free), logits(rem))


@pytest.mark.parametrize("longest", [1, KERNEL, KERNEL + 1, 50])
def test_learned_lags_agree_with_a_loop(longest):
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
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), wanted) for x in (found, expected)))


@pytest.mark.parametrize(("variant", "dilations"), [("rsa", [1] * 4), (HALF, [1] * 2), (DILATED, [1, 1, 6, 6])])
def test_heads_of_a_variant(variant, dilations):
    plans = [heads.plan for _, heads in active_heads(make_variant(variant, plain(), SHAPE.block))]
    assert [list(plan.dilations) for plan in plans] == [dilations] * SHAPE.layers
    assert all(len(set(plan.theta)) == len(dilations) // 2 for plan in plans)


def test_the_pace_of_a_variant():
    model = make_variant(PACE, plain(), SHAPE.block)
    assert {heads.plan.parameter_scale for _, heads in active_heads(model)} == {1.0}
    torch.testing.assert_close(logits(model), logits(make_variant("rsa", plain(), SHAPE.block)))


def test_a_token_gate_is_the_gate_of_that_token():
    model, rsa = (make_variant(name, plain(), SHAPE.block) for name in (TOKEN_GATES, "rsa"))
    torch.testing.assert_close(logits(model), logits(rsa))
    # Against gates that are the same for all tokens, one token after another.
    heads, fixed = (each.model.layers[0].self_attn.rsa for each in (model, rsa))
    with torch.no_grad():
        heads.w.normal_()
    attention, value = torch.randn(1, 7, SHAPE.heads, 8), torch.randn(1, SHAPE.heads, 7, 8)
    found = heads(attention, value, AttentionMask(7, 7, 0, causal=True))
    for h in range(SHAPE.heads):
        for t in range(7):
            logit = heads.mu[0] * heads.plan.parameter_scale + heads.w[h] @ value[0, h, t]
            with torch.no_grad():
                fixed.mu.fill_(logit / heads.plan.parameter_scale)
            expected = fixed(attention, value, AttentionMask(7, 7, 0, causal=True))[0, t, h]
            torch.testing.assert_close(found[0, t, h], expected)


def test_channel_gates_are_those_of_token_gates_that_see_no_token():
    """As many numbers as token gates have, and values of one in a single channel read them."""
    token, channel = (make_variant(name, plain(), SHAPE.block) for name in (TOKEN_GATES, CHANNEL_GATES))
    assert token.num_parameters() == channel.num_parameters()
    torch.testing.assert_close(logits(token), logits(channel))
    of_tokens, of_channels = (each.model.layers[0].self_attn.rsa for each in (token, channel))
    attention, value = torch.randn(1, 7, SHAPE.heads, 8), torch.zeros(1, SHAPE.heads, 7, 8)
    value[..., 3] = 1
    with torch.no_grad():
        of_tokens.w.normal_()
        of_channels.w.normal_()
        of_channels.w[:, 3] = of_tokens.w[:, 3]
    mask = AttentionMask(7, 7, 0, causal=True)
    found, expected = (heads(attention, value, mask) for heads in (of_channels, of_tokens))
    torch.testing.assert_close(found[..., 3], expected[..., 3])
    assert not torch.allclose(found[..., 4], expected[..., 4])


def test_two_rems_are_two_layers_of_rsa_heads_on_one_attention():
    heads = make_variant(TWO_REMS, plain(), SHAPE.block).model.layers[1].self_attn.rsa
    attention, value = torch.randn(1, 9, SHAPE.heads, 8), torch.randn(1, SHAPE.heads, 9, 8)
    found = heads(attention, value, AttentionMask(9, 9, 0, causal=True))
    for each in (heads, heads.second):
        rates, plan = each.rates(), each.plan
        decay, theta = each.per_head(rates)
        product = torch.zeros_like(attention)
        for h, kind in enumerate(plan.kinds):
            for t in range(9):
                for s in range(t):
                    wave = {"regular": torch.ones_like, "cos": torch.cos, "sin": torch.sin}[kind]((t - s) * theta[h])
                    product[:, t, h] += decay[h] ** (t - s) * wave * value[:, h, s]
        attention = (1 - rates["gate"]) * attention + rates["gate"] * product
    torch.testing.assert_close(found, attention)


@pytest.mark.parametrize(("variant", "name"), [(ON_KEYS, "k_proj"), (ON_VALUES, "v_proj")])
def test_keys_and_values_are_mixed_with_those_before_them(variant, name):
    model = make_variant(variant, plain(), SHAPE.block)
    projection = getattr(model.model.layers[1].self_attn, name)
    hidden = torch.randn(2, 9, SHAPE.width)
    rates, plan = projection.heads.rates(), projection.heads.plan
    decay, theta = projection.heads.per_head(rates)
    gate = rates["gate"].expand(SHAPE.heads)
    keys = projection.projection(hidden).view(2, 9, SHAPE.heads, -1)
    expected = torch.zeros_like(keys)
    for h, kind in enumerate(plan.kinds):
        for t in range(9):
            expected[:, t, h] = (1 - gate[h]) * keys[:, t, h]
            for s in range(t):
                wave = {"cos": torch.cos, "sin": torch.sin}[kind]((t - s) * theta[h])
                expected[:, t, h] += gate[h] * decay[h] ** (t - s) * wave * keys[:, s, h]
    torch.testing.assert_close(projection(hidden), expected.flatten(2))


def test_without_softmax_the_gate_stays_open():
    model = make_variant("no softmax", plain(), SHAPE.block)
    gates = [heads.rates()["gate"] for _, heads in active_heads(model)]
    assert gates and all(bool((gate == 1).all()) for gate in gates)
    assert not [name for name, p in model.named_parameters() if name.endswith("rsa.mu") and p.requires_grad]


def test_without_recurrence_is_rsa_with_a_rem_of_zeros(monkeypatch):
    damped = logits(make_variant("no recurrence", plain(), SHAPE.block))
    zero_rems(monkeypatch)
    torch.testing.assert_close(damped, logits(make_variant("rsa", plain(), SHAPE.block)))


def test_alibi_is_a_linear_bias_on_the_scores():
    model = make_variant("alibi", plain(), SHAPE.block)
    assert model.bias.shape == (1, SHAPE.heads, SHAPE.block, SHAPE.block)
    assert model.bias[0, 0, 5, 3] == pytest.approx(-2 * 2 ** (-8 / SHAPE.heads))
    assert model.bias[0, -1, 5, 4] == pytest.approx(-(2**-8))
    assert bool((model.bias[0, :, 3, 4] < -1e30).all())


def test_the_time_of_a_step_is_relative_to_another_model():
    shallow, deep = plain(), build("llama", replace(SHAPE, layers=6 * SHAPE.layers))
    assert step_time_ratio(deep, shallow, IDS) > 2
    assert step_time_ratio(shallow, deep, IDS) < 0.5
    assert all(parameter.grad is None for parameter in deep.parameters())


def test_a_curve_gives_tokens_until_a_score_and_the_score_after_tokens():
    curve = Curve([100.0, 200.0, 300.0], [4.0, 3.0, 3.5])
    assert curve.tokens_until(5.0) == 100
    assert curve.tokens_until(3.5) == 150
    assert curve.tokens_until(3.0) == 200
    assert curve.tokens_until(2.9) == math.inf
    assert [curve.score_at(tokens) for tokens in (50, 150, 300, 400)] == [4.0, 3.5, 3.5, 3.5]


def runs_of(**scores):
    """Runs with these curves, one point per 10 bytes; a step takes 1.2 times as long as the plain model's."""
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
    # 5, half way, is a quarter of the way from 5.5 to 3.5.
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
    more = [*runs, *runs_of(no_recurrence=(6, 5, 4, 2.5), two_rems=(6, 5, 4, 2.25))]
    assert (
        conclude("sample-efficiency", more)
        .findings[0]
        .endswith(
            "; bits per byte relative to RSA: two rems +0.250 (one seed)"
            "; RSA ends -0.500 bits per byte relative to no recurrence"
        )
    )


def test_a_best_rate_at_the_edge_of_the_search_is_named():
    rates = (1e-4, 1e-3, 1e-2)
    inside = [fake_runs("sample-efficiency", "plain", [3.0 + (rate != 1e-3)], rate=rate) for rate in rates]
    at_the_end = [fake_runs("sample-efficiency", "rsa", [2 - rate], rate=rate) for rate in rates]
    words = "; best at the lowest or highest learning rate tried: rsa"
    assert conclude("sample-efficiency", *inside, *at_the_end).findings[0].endswith(words)
    # One of two rates is always at an edge.
    assert "rate tried" not in conclude("sample-efficiency", *inside[:2], *at_the_end[:2]).findings[0]


@pytest.mark.parametrize("scores", [(6, 4, 3, 2.5), (6, 3, 3.5, 4.0), (3, 4, 5, 6.0)])
def test_a_variant_equal_to_the_plain_model_needs_as_many_tokens(scores):
    """Also if its curve rises, so that its final score was reached long before."""
    runs = runs_of(plain=scores, rsa=scores)
    rows = EXPERIMENT.summarise(runs)
    assert rows.mean(RATIO) == rows.mean("tokens / plain, half way") == 1
    assert conclude("sample-efficiency", runs).verdict == "not confirmed"


@pytest.mark.parametrize(
    ("variant", "heads", "nu", "theta"),
    [("published", SHAPE.heads // 2, (1, 2), (math.pi / 4,) * 2), ("rsa", SHAPE.heads, (0, 0), (0, math.pi))],
)
def test_the_plan_of_a_variant(variant, heads, nu, theta):
    plan = next(found.plan for _, found in active_heads(make_variant(variant, plain(), SHAPE.block)))
    assert plan.num_rsa_heads == heads
    pairs = heads // 2
    for found, (low, high) in ((plan.nu, nu), (plan.theta, theta)):
        assert found == pytest.approx([low + (high - low) * (i + 0.5) / pairs for i in range(pairs)])


def toy_conclusion(rate=1e-2):
    grid = [
        settings
        for settings in EXPERIMENT.grid("toy", 1)
        if (settings["family"], settings["learning_rate"]) == ("gpt2", rate) and settings["arm"] in ("plain", "rsa")
    ]
    return conclude("sample-efficiency", [finished(settings, EXPERIMENT.measure(settings)) for settings in grid])


def test_gates_that_stay_shut_win_nothing(monkeypatch):
    assert toy_conclusion().verdict != "not confirmed"

    def broken(variant, model, longest):
        if variant == "rsa":
            patch_with_shut_gates(model)
        return model

    monkeypatch.setattr(sample_efficiency, "make_variant", broken)
    conclusion = toy_conclusion()
    assert conclusion.verdict == "not confirmed"
    assert "1.00 (one seed) of the plain" in conclusion.findings[0]


def test_a_rem_of_zeros_loses(monkeypatch):
    assert toy_conclusion(rate=3e-3).verdict != "not confirmed"
    zero_rems(monkeypatch)
    assert toy_conclusion(rate=3e-3).verdict == "not confirmed"
