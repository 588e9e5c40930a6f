"""One RSA layer against the paper's equation written out, and its stored parameters."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from references import equation_4, relative_error
from rsa_hf import RSAConfig, RSAHeads
from rsa_hf.ops.mask import AttentionMask

PLAN = {
    "num_regular": 2,
    "num_cyclical_pairs": 1,
    "num_dilated_regular": 1,
    "num_dilated_cyclical_pairs": 1,
    "dilation": [2, 3, 4],
}


def make(tie_pairs=True, **values) -> RSAHeads:
    config = RSAConfig(**{**PLAN, **values})
    if not tie_pairs:
        heads = [replace(head, pair=None) for head in config.counted_heads(0, 10)]
        config = RSAConfig(heads=heads, gate_per_head=config.gate_per_head)
    return RSAHeads(config.layer_specs([10])[0])


def draw(dtype=torch.float32):
    """Arguments of a layer with 10 heads: attention, V and a causal mask."""
    return torch.randn(2, 9, 10, 4).to(dtype), torch.randn(2, 10, 9, 4).to(dtype), AttentionMask(9, 9, 0, True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gate_per_head", [True, False])
@pytest.mark.parametrize("tie_pairs", [True, False])
@pytest.mark.parametrize("value_heads", [10, 5, 2])
def test_equation_4_with_plain_heads_and_grouped_values(causal, gate_per_head, tie_pairs, value_heads):
    T, H, D, R = 23, 10, 4, 7
    heads = make(gate_per_head=gate_per_head, tie_pairs=tie_pairs, gate_init=0.3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.01)
    attention, value = torch.randn(2, T, H, D).double(), torch.randn(2, value_heads, T, D).double()
    expected = equation_4(heads, attention, value, causal=causal)
    found = heads(attention, value, AttentionMask(T, T, 0, causal))
    assert relative_error(found, expected) < 1e-6  # rates are float32
    assert torch.equal(found[:, :, R:], attention[:, :, R:])
    # The rates belong to the heads in their order: regular, cos, sin, dilated regular, dilated cos, dilated sin.
    rates, rems = heads.rates(torch.float64), heads.rems_and_gate()[0]
    places = [0, 0, 1, 1] if tie_pairs else [0, 1, 2, 3]
    (a, b, c), gamma, angles = rates["lam"], rates["gamma"][places], rates["theta"][places]
    assert torch.equal(rems.decay, torch.stack([a, b, *gamma[:2], c, *gamma[2:]]))
    assert torch.equal(rems.theta, torch.stack([0 * a, 0 * b, *angles[:2], 0 * c, *angles[2:]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shut_gate_changes_no_bit(dtype):
    attention, *others = draw(dtype)
    out = make(gate_init=-math.inf)(attention, *others)
    assert out.dtype == dtype
    assert torch.equal(out, attention)


def test_gradients_of_stored_parameters_are_those_of_finite_differences():
    heads = make(gate_init=0.2, gate_per_head=True)
    attention, value = torch.randn(1, 8, 10, 2).double(), torch.randn(1, 10, 8, 2).double()
    names = [name for name, _ in heads.named_parameters()]
    stored = [parameter.detach().double().requires_grad_() for parameter in heads.parameters()]

    def run(*values):
        return torch.func.functional_call(
            heads, dict(zip(names, values, strict=True)), (attention, value, AttentionMask(8, 8, 0, True))
        )

    assert torch.autograd.gradcheck(run, stored)


def test_parameters_start_where_the_plan_says():
    heads = make(gate_init=-3.0)
    rates = heads.rates()
    scale = heads.spec.parameter_scale
    torch.testing.assert_close(rates["gate"], torch.sigmoid(torch.tensor([-3.0])))
    eta = heads.eta * scale
    assert bool(((eta.abs() >= 1) & (eta.abs() <= 2)).all())
    assert eta.unique().numel() == 3
    torch.testing.assert_close(rates["gamma"], torch.sigmoid(torch.tensor([1.25, 1.75])))
    torch.testing.assert_close(rates["theta"], torch.full((2,), math.pi / 4))
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
    assert all(p.dim() == 1 for p in heads.parameters())


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_parameter_scale_changes_stored_values_but_not_rates(scale):
    plain, scaled = make(parameter_scale=1.0), make(parameter_scale=scale)
    for name, rate in plain.rates().items():
        torch.testing.assert_close(scaled.rates()[name], rate)
    torch.testing.assert_close(scaled.mu * scale, plain.mu)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.bfloat16)])
def test_parameters_stay_float32_when_the_model_is_cast(cast):
    heads = make()
    before = copy.deepcopy(heads.state_dict())
    model = cast(torch.nn.Sequential(torch.nn.Linear(2, 2), heads))
    assert model[0].weight.dtype != torch.float32
    for name, value in model[1].state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == torch.float32


def test_more_rsa_heads_than_heads_is_an_error():
    with pytest.raises(ValueError, match="up to index 6.*has 4 heads"):
        make()(torch.randn(1, 5, 4, 2), torch.randn(1, 4, 5, 2), AttentionMask(5, 5, 0, True))


def test_lengths_that_do_not_fit_the_mask_are_an_error():
    with pytest.raises(ValueError, match="5 queries and 5 values.*6 and 6"):
        make()(torch.randn(1, 5, 10, 2), torch.randn(1, 10, 5, 2), AttentionMask(6, 6, 0, True))


@pytest.mark.parametrize("queries", [1, 5, 23])
def test_each_head_follows_its_own_mask(queries):
    T, S, H, R = queries, 23, 10, 7
    heads, value = make(gate_init=0.3), torch.randn(2, H, S, 4)
    visible = torch.rand(2, H, T, S) < 0.7
    attention = torch.randn(2, T, H, 4)
    found = heads(attention, value, AttentionMask(T, S, S - T, True, visible=visible))
    for h in range(R):  # as if all heads had the mask of this one
        alone = heads(attention, value, AttentionMask(T, S, S - T, True, visible=visible[:, h : h + 1]))
        torch.testing.assert_close(found[:, :, h], alone[:, :, h])
    other = heads(attention, value, AttentionMask(T, S, S - T, True, visible=visible[:, :1]))
    assert float((found - other)[:, :, 1:R].detach().abs().max()) > 1e-2
