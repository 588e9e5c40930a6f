"""SRU++ against loops written from the paper, and its state."""

import math
from functools import partial

import pytest
import torch
from transformers import AutoModel

from families import ATTENTIONS
from models import tiny
from models.tiny import attention_by_hand, text, values_and_gradients
from references import relative_error
from rsa_hf import unpatch_model
from rsa_hf.models.sru_plus_plus.modeling_sru_plus_plus import cells

D, HEADS = 12, 8
build = partial(tiny.build, "sru_plus_plus")


def by_hand(model, tokens, gate_sees_the_cell=True):
    rows = []
    for row in tokens:
        inputs = list(model.embeddings(row))
        for layer in model.layers:
            inputs = recur_by_hand(layer, inputs, attend_by_hand(layer.attention, inputs), gate_sees_the_cell)
        rows.append(torch.stack(inputs))
    return torch.stack(rows)


def attend_by_hand(module, inputs):
    heads = (module.config.num_attention_heads, -1)
    Q = torch.stack(inputs) @ module.q_proj.weight.T
    key, value = (Q @ module.kv_proj.weight.T).unflatten(-1, (2, *heads)).unbind(1)
    x = Q + module.alpha * attention_by_hand(module, Q.unflatten(-1, heads), key, value)
    deviation = (x.var(-1, unbiased=False, keepdim=True) + module.layer_norm.eps).sqrt()
    normal = (x - x.mean(-1, keepdim=True)) / deviation
    return (normal * module.layer_norm.weight + module.layer_norm.bias) @ module.o_proj.weight.T


def recur_by_hand(layer, inputs, U, gate_sees_the_cell=True):
    c, outputs = torch.zeros_like(inputs[0]), []
    for x, u in zip(inputs, U, strict=True):
        u_f, u_r, u_c = u.split(D)
        seen = c if gate_sees_the_cell else 0 * c
        f = torch.sigmoid(u_f + layer.forget_weight * seen + layer.forget_bias)
        r = torch.sigmoid(u_r + layer.highway_weight * c + layer.highway_bias)
        c = f * c + (1 - f) * u_c
        outputs.append(r * c + (1 - r) * x)
    return outputs


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    ("length", "heads", "rsa"), [*((n, h, None) for n in (1, 2, 7) for h in (1, HEADS)), (9, HEADS, {})]
)
def test_agrees_with_steps_by_hand(length, heads, rsa, attention):
    model = build(attention, rsa, AutoModel, num_attention_heads=heads).double()
    tokens = text(length=length)
    found = values_and_gradients(model, model(tokens).last_hidden_state)
    expected = values_and_gradients(model, by_hand(model, tokens))
    assert sum(".rsa." in name for name in expected) == (0 if rsa is None else 8)
    tolerance = 1e-10 if rsa is None else 1e-5  # gates and rates are float32 in any model
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance * max(1.0, float(value.abs().max())), name
        assert length == 1 or bool(value.any()), name
    if length > 2:  # the control: a forget gate that does not see the cell
        broken = by_hand(model, tokens, gate_sees_the_cell=False).detach()
        assert relative_error(found["output"], broken) > 1e-3
    if rsa is not None:
        assert relative_error(unpatch_model(model)(tokens).last_hidden_state, expected["output"]) > 1e-2


def test_an_infinite_forget_gate_holds_the_cell_and_passes_gradients():
    """As padding does."""
    forget, candidate, weight, first = torch.randn(2, 5, 3), torch.randn(2, 5, 3), torch.randn(3), torch.randn(2, 3)
    arguments = [tensor.double().requires_grad_() for tensor in (forget, candidate, weight, first)]
    held = torch.tensor([0, 1, 0, 0, 1]).bool()[None, :, None]

    def with_held(forget, *others):
        return cells(forget.masked_fill(held, math.inf), *others)

    assert torch.autograd.gradcheck(with_held, arguments)
    found = with_held(*arguments)
    assert torch.equal(found[:, 1], found[:, 0])
