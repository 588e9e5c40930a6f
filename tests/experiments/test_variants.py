"""The variants of a model that experiments compare, against plain arithmetic."""

import pytest
import torch

from experiment_runs import zero_rems
from experiments import variants as v
from experiments.byte_models import SHAPES, build
from rsa_hf import RSAConfig

SHAPE = SHAPES["0.03M"]
IDS = torch.arange(40).remainder(7)[None]


def plain():
    torch.manual_seed(0)
    return build("llama", SHAPE).eval()


def variant(name):
    return v.make_variant(name, plain(), SHAPE.block).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", v.VARIANTS)
def test_a_variant_is_causal_and_trains_all_parameters(name):
    model = variant(name)
    changed = IDS.clone()
    changed[0, 30:] = 9
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=changed).logits[:, :30], logits(model)[:, :30])
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert (name == "plain") == torch.equal(logits(model), logits(plain()))


@pytest.mark.parametrize("name", ["learned toeplitz", v.TOKEN_GATES, v.CHANNEL_GATES, v.PACE, v.LEARNED_START])
def test_these_variants_start_as_rsa(name):
    torch.testing.assert_close(logits(variant(name)), logits(variant("rsa")))


@pytest.mark.parametrize(("name", "dilations"), [("rsa", [1] * 4), (v.HALF, [1] * 2), (v.DILATED, [1, 1, 6, 6])])
def test_heads_of_a_variant(name, dilations):
    plans = [heads.plan for _, heads in v.patched_modules(variant(name))]
    assert [list(plan.dilations) for plan in plans] == [dilations] * SHAPE.layers


def loop(f, value, gate, attention):
    """(1 − g) · attention + g · Σ_s f(t − s) v_s, for attention [B, T, H, D], V [B, H, T, D] and f [H, lags]."""
    mixed = torch.zeros_like(attention)
    for t in range(value.shape[2]):
        mixed[:, t] = (1 - gate) * attention[:, t]
        for s in range(max(0, t - f.shape[1]), t):
            mixed[:, t] = mixed[:, t] + gate * f[:, t - s - 1, None] * value[:, :, s]
    return mixed


def lag_weights(heads, longest):
    """f(1) … f(longest) of every head."""
    decay, theta = heads.per_head(heads.rates())
    lags, kinds = torch.arange(1.0, longest + 1), {"regular": torch.ones_like, "cos": torch.cos, "sin": torch.sin}
    return torch.stack([d**lags * kinds[kind](lags * a) for kind, d, a in zip(heads.plan.kinds, decay, theta)])  # noqa: B905


@pytest.mark.parametrize("longest", [1, v.KERNEL, 50])
def test_learned_lags_agree_with_a_loop(longest):
    """Values and gradients, at lengths below and above the longest lag."""
    lags = v.LearnedLags(v.make_heads(RSAConfig.from_scratch(4), 4), longest)
    for T in (3, 7):
        attention, value = torch.randn(2, T, 4, 3), torch.randn(2, 4, T, 3, requires_grad=True)
        expected, found = loop(lags.f, value, lags.rates()["gate"], attention), lags(attention, value, None)
        torch.testing.assert_close(found, expected)
        wanted = (value, lags.f, lags.mu)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), wanted) for x in (found, expected)))


def test_a_token_gate_is_the_gate_of_that_token():
    heads = v.TokenGates(v.make_heads(RSAConfig.from_scratch(4), 4), 3)
    torch.nn.init.normal_(heads.w)
    attention, value = torch.randn(2, 7, 4, 3), torch.randn(2, 4, 7, 3)
    gates = torch.sigmoid(heads.rates()["gate"].logit() + torch.einsum("bhtd,hd->bth", value, heads.w))[..., None]
    product = loop(lag_weights(heads, 7), value, torch.ones(1), attention)
    torch.testing.assert_close(heads(attention, value, None), (1 - gates) * attention + gates * product)


def test_two_rems_are_mixed_one_after_the_other():
    [_, (_, heads)] = v.patched_modules(variant(v.TWO_REMS))
    attention, value = torch.randn(2, 9, SHAPE.heads, 8), torch.randn(2, SHAPE.heads, 9, 8)
    expected = attention
    for each in (heads, heads.second):
        expected = loop(lag_weights(each, 9), value, each.rates()["gate"], expected)
    torch.testing.assert_close(heads(attention, value, None), expected)


@pytest.mark.parametrize(("name", "projection"), [(v.ON_KEYS, "k_proj"), (v.ON_VALUES, "v_proj")])
def test_keys_and_values_are_mixed_with_those_before_them(name, projection):
    mixed = getattr(variant(name).model.layers[1].self_attn, projection)
    hidden = torch.randn(2, 9, SHAPE.width)
    keys = mixed.projection(hidden).view(2, 9, SHAPE.heads, -1)
    expected = loop(lag_weights(mixed.heads, 9), keys.transpose(1, 2), mixed.heads.rates()["gate"], keys)
    torch.testing.assert_close(mixed(hidden), expected.flatten(2))


def test_without_softmax_the_gate_stays_open():
    heads = [heads for _, heads in v.patched_modules(variant("no softmax"))]
    assert all(bool((each.rates()["gate"] == 1).all()) and not each.mu.requires_grad for each in heads)


def test_without_recurrence_is_rsa_with_a_rem_of_zeros(monkeypatch):
    damped = logits(variant(v.NO_RECURRENCE))
    zero_rems(monkeypatch)
    torch.testing.assert_close(damped, logits(variant("rsa")))
