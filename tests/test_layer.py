"""One RSA layer: its stored parameters, a mask per head, and errors. ops/test_learned.py has its values."""

import copy
import math

import pytest
import torch

from families import FULL_PLAN
from rsa_hf import RSAConfig, RSAHeads
from rsa_hf.ops.mask import AttentionMask


def make(**values):
    return RSAHeads(RSAConfig(**{**FULL_PLAN, "num_regular": 2, **values}).layer_specs([10])[0])


def test_parameters_start_where_the_plan_says():
    heads = make(gate_init=-3.0)
    rates = heads.rates()
    scale = heads.spec.layout.scale
    torch.testing.assert_close(rates["gate"], torch.sigmoid(torch.tensor([-3.0])))
    eta = heads.eta * scale
    assert bool(((eta.abs() >= 1) & (eta.abs() <= 2)).all())
    assert eta.unique().numel() == 3
    torch.testing.assert_close(rates["gamma"], torch.sigmoid(torch.tensor([1.25, 1.75])))
    torch.testing.assert_close(rates["theta"], torch.full((2,), math.pi / 4))
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
    assert all(p.dim() == 1 for p in heads.parameters())


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.bfloat16)])
def test_parameters_stay_float32_when_the_model_is_cast(cast):
    heads = make()
    before = copy.deepcopy(heads.state_dict())
    model = cast(torch.nn.Sequential(torch.nn.Linear(2, 2), heads))
    assert model[0].weight.dtype != torch.float32
    for name, value in model[1].state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == torch.float32


@pytest.mark.parametrize("gate", [-math.inf, math.inf])
def test_an_average_of_gates_that_start_shut_or_open_is_shut_or_open(gate):
    heads = make(gate_init=gate)
    with torch.no_grad():
        heads.mu.copy_(heads.mu.lerp(heads.mu, 0.1))
    assert heads.rates()["gate"].tolist() == [float(gate > 0)]


def test_parameters_that_trl_has_rounded_learn_in_float32():
    heads, attention, value = make(), torch.randn(2, 5, 7, 4), torch.randn(2, 7, 5, 4)
    for parameter in heads.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    with torch.inference_mode():  # before training, as an evaluation does
        heads(attention, value, AttentionMask(5, 5, 0, True))
    heads(attention, value, AttentionMask(5, 5, 0, True)).sum().backward()
    assert {tensor.dtype for p in heads.parameters() for tensor in (p, p.grad)} == {torch.float32}


@pytest.mark.parametrize(
    ("H", "T", "D", "message"),
    [
        (4, 5, 2, "up to index 6.*has 4 heads"),
        (10, 6, 2, "for 6 queries and 6 keys"),
        (10, 5, 9, "value .1, 10, 5, 2"),
    ],
)
def test_a_layer_with_too_few_heads_and_other_sizes_than_those_of_v_or_the_mask_are_errors(H, T, D, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.randn(1, 5, H, D), torch.randn(1, H, 5, 2), AttentionMask(T, T, 0, True))
