"""The variants of a model that experiments compare, against plain arithmetic."""

from dataclasses import replace

import pytest
import torch

from experiment_runs import zero_rems
from experiments import variants as v
from experiments.byte_models import SHAPES, build

SHAPE = SHAPES["0.03M"]
IDS = torch.arange(40).remainder(7)[None]


def plain(family="llama"):
    torch.manual_seed(0)
    return build(family, SHAPE).eval()


def variant(name, family="llama"):
    return v.make_variant(name, plain(family), SHAPE.block).eval()


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in v.VARIANTS), *(("gpt2", name) for name in (*v.VARIANTS, *v.OF_GPT2))],
)
def test_a_variant_is_causal_and_trains_all_parameters(family, name):
    model = variant(name, family)
    changed = IDS.clone()
    changed[0, 30:] = 9
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=changed).logits[:, :30], logits(model)[:, :30])
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert (name == "plain") == torch.equal(logits(model), logits(plain(family)))


@pytest.mark.parametrize("name", [v.TOEPLITZ, v.PAPER])
def test_these_variants_start_as_rsa(name):
    torch.testing.assert_close(logits(variant(name)), logits(variant("rsa")))


# Two tokens change places. Without positions the last output can tell only by what the causal mask shows each of them.
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_without_positions_a_layer_sees_a_set(family):
    torch.manual_seed(0)
    model = build(family, replace(SHAPE, layers=1)).eval()
    swapped = IDS[:, [1, 0, *range(2, 40)]]
    assert not torch.allclose(logits(model)[0, -1], logits(model, swapped)[0, -1], atol=1e-6)
    v.remove_positions(model)
    torch.testing.assert_close(logits(model)[0, -1], logits(model, swapped)[0, -1])


def test_without_recurrence_is_rsa_with_a_rem_of_zeros(monkeypatch):
    damped = logits(variant(v.NO_RECURRENCE))
    zero_rems(monkeypatch)
    torch.testing.assert_close(damped, logits(variant("rsa")))
