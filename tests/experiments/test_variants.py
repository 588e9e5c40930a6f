"""The variants of a model that experiments compare, against plain arithmetic."""

import pytest
import torch

from experiment_runs import zero_rems
from experiments import variants as v
from experiments.byte_models import SHAPES, build

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


@pytest.mark.parametrize("name", ["learned toeplitz", v.PACE])
def test_these_variants_start_as_rsa(name):
    torch.testing.assert_close(logits(variant(name)), logits(variant("rsa")))


@pytest.mark.parametrize(("name", "dilations"), [("rsa", [1] * 4), (v.HALF, [1] * 2), (v.DILATED, [1, 1, 6, 6])])
def test_heads_of_a_variant(name, dilations):
    plans = [heads.spec for _, heads in v.patched_modules(variant(name))]
    assert [list(plan.dilations) for plan in plans] == [dilations] * SHAPE.layers


def test_without_softmax_the_gate_stays_open():
    heads = [heads for _, heads in v.patched_modules(variant("no softmax"))]
    assert all(bool((each.rates()["gate"] == 1).all()) and not each.mu.requires_grad for each in heads)


def test_without_recurrence_is_rsa_with_a_rem_of_zeros(monkeypatch):
    damped = logits(variant(v.NO_RECURRENCE))
    zero_rems(monkeypatch)
    torch.testing.assert_close(damped, logits(variant("rsa")))
