"""SRU++ against loops written from the paper; its state, and padding."""

import math
from functools import partial

import pytest
import torch
from transformers import AutoModel

from families import ATTENTIONS, FULL_PLAN
from models import tiny
from models.tiny import in_segments, text, values_and_gradients
from references import double_loop, relative_error
from rsa_hf import patch_model, unpatch_model
from rsa_hf.models.sru_plus_plus import SRUPlusPlusModel
from rsa_hf.models.sru_plus_plus.modeling_sru_plus_plus import cells

D, SMALL, HEADS = 12, 16, 8
RSA = [None, {}]
RSA_IDS = ["plain", "rsa"]
build = partial(tiny.build, "sru_plus_plus")


def by_hand(model, tokens, gate_sees_the_cell=True):
    """Every row, layer and step on its own: attention in a loop over queries and keys, RSA by the double loop."""
    rows = []
    for row in tokens:
        inputs = list(model.embeddings(row))
        for layer in model.layers:
            inputs = recur_by_hand(layer, inputs, attend_by_hand(layer.attention, inputs), gate_sees_the_cell)
        rows.append(torch.stack(inputs))
    return torch.stack(rows)


def attend_by_hand(module, inputs):
    W_q, W_o = module.q_proj.weight, module.o_proj.weight
    W_k, W_v = module.kv_proj.weight.split(SMALL)
    H, T, width = module.config.num_attention_heads, len(inputs), SMALL // module.config.num_attention_heads
    Q = [W_q @ x for x in inputs]
    K, V = [W_k @ q for q in Q], [W_v @ q for q in Q]
    A = []
    for t in range(T):
        heads = []
        for h in range(H):
            part = slice(h * width, (h + 1) * width)
            weights = torch.stack([Q[t][part] @ K[s][part] / math.sqrt(width) for s in range(t + 1)]).softmax(0)
            heads.append(sum(weights[s] * V[s][part] for s in range(t + 1)))
        A.append(torch.stack(heads))
    A = torch.stack(A)
    if hasattr(module, "rsa"):
        plan, rates = module.rsa.plan, module.rsa.rates()
        decay, theta = module.rsa.per_head(rates)
        R = plan.num_rsa_heads
        value = torch.stack(V).view(T, H, width).transpose(0, 1)[None, :R]
        P_V = double_loop(value, plan.kinds, decay, theta, plan.dilations, T, 0, True)[0].transpose(0, 1)
        gate = rates["gate"]
        A = torch.cat([(1 - gate) * A[:, :R] + gate * P_V, A[:, R:]], dim=1)
    U = []
    for t in range(T):
        x = Q[t] + module.alpha * A[t].flatten()
        normal = (x - x.mean()) / (x.var(unbiased=False) + module.layer_norm.eps).sqrt()
        U.append(W_o @ (normal * module.layer_norm.weight + module.layer_norm.bias))
    return U


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


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_agrees_with_steps_by_hand(length, attention, heads):
    model, tokens = build(attention, auto=AutoModel, num_attention_heads=heads).double(), text(length=length)
    found = values_and_gradients(model, model(tokens).last_hidden_state)
    expected = values_and_gradients(model, by_hand(model, tokens))
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-10 * max(1.0, float(value.abs().max())), name
        assert length == 1 or bool(value.any()), name
    if length > 2:  # a forget gate that does not look at the cell is something else
        broken = by_hand(model, tokens, gate_sees_the_cell=False).detach()
        assert relative_error(found["output"], broken) > 1e-3


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_rsa_heads_mix_into_its_attention(attention):
    """Gates and rates are float32 in any model, and so is the agreement."""
    model, tokens = build(attention, rsa={}, auto=AutoModel), text(length=9)
    found = values_and_gradients(model, model(tokens).last_hidden_state)
    expected = values_and_gradients(model, by_hand(model, tokens))
    assert sum(".rsa." in name for name in expected) == 8
    for name, value in expected.items():
        # The gradient of α is one number, in which much cancels out.
        assert relative_error(found[name], value) <= (3e-5 if name.endswith("alpha") else 1e-5), name
    assert relative_error(unpatch_model(model)(tokens).last_hidden_state, expected["output"]) > 1e-2


def test_gradients_of_the_cells():
    """Against numerical ones, in a step that stays as it is (an infinite gate), too."""
    forget, candidate = torch.randn(2, 5, 3).double(), torch.randn(2, 5, 3).double()
    arguments = [forget, candidate, torch.randn(3).double(), torch.randn(2, 3).double()]
    for argument in arguments:
        argument.requires_grad_()
    assert torch.autograd.gradcheck(cells, arguments)
    held = torch.tensor([0, 1, 0, 0, 1]).bool()[None, :, None]

    def with_held(forget, *others):
        return cells(forget.masked_fill(held, math.inf), *others)

    assert torch.autograd.gradcheck(with_held, arguments)
    found = with_held(*arguments)
    assert torch.equal(found[:, 1], found[:, 0])


@torch.no_grad()
def test_a_fresh_layer_is_a_recurrence_alone():
    """α = 0: tokens meet in the recurrence alone, whose weights are W_o and W_q in one; highway gates start low."""
    model = SRUPlusPlusModel(tiny.config("sru_plus_plus"))
    for layer in model.layers:
        assert layer.attention.alpha.tolist() == [0.0]
        assert set(layer.highway_bias.tolist()) == {-2.0}
        assert float(layer.forget_weight.abs().max()) <= 1
    hidden, visible = torch.randn(2, 5, D), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    attention = model.layers[0].attention
    alone = attention.o_proj(attention.layer_norm(attention.q_proj(hidden)))
    assert torch.equal(attention(hidden, None, visible)[0], alone)


@torch.no_grad()
def test_the_state_holds_cells_and_the_last_inputs():
    model, tokens = build(mem_len=10), text()
    first = model(tokens[:, :6], output_hidden_states=True)
    assert [tuple(part.shape) for part in first.state] == [(2, D)] * 2 + [(2, 6, D)] * 2
    assert torch.equal(first.state[3], first.hidden_states[1])
    second = model(tokens[:, 6:13], state=first.state)
    assert torch.equal(second.state[2][:, :3], first.hidden_states[0][:, 3:])
    assert second.state[2].shape == (2, 10, D)
    none = build(mem_len=0)
    assert none(tokens).state[2].shape == (2, 0, D)
    assert none(tokens, state=none(tokens).state).logits.isfinite().all()
    assert none(tokens, use_cache=False).state is None


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_padding_changes_nothing(rsa, attention):
    """On either side and, without RSA heads, whose distances it takes part in, between; values and state."""
    model, tokens = build(attention=attention, rsa=rsa), text(3, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, 7:] = 0
    if rsa is None:
        mask[2, [0, 4, 5, 11]] = 0
    outputs = model(tokens, attention_mask=mask)
    for b in range(3):
        real = mask[b].bool()
        alone = model(tokens[b : b + 1, real])
        torch.testing.assert_close(outputs.logits[b, real], alone.logits[0], rtol=1e-5, atol=1e-5)
        for layer in range(2):
            torch.testing.assert_close(outputs.state[layer][b], alone.state[layer][0], rtol=1e-5, atol=1e-5)
    assert float((model(tokens).logits - outputs.logits)[0, 5:].abs().max()) > 1e-2
    # The next segment's mask says what of the memory was padding.
    then = text(3, 5)
    longer = torch.cat([mask, torch.ones_like(then)], dim=1)
    behind = model(then, attention_mask=longer, state=outputs.state).logits
    alone = in_segments(model, torch.cat([tokens[:1, 5:], then[:1]], dim=1), [7, 5])[:, 7:]
    torch.testing.assert_close(behind[:1], alone, rtol=1e-5, atol=1e-5)
    unsaid = model(then, attention_mask=torch.ones_like(then), state=outputs.state).logits
    assert float((unsaid[:1] - alone).abs().max()) > 1e-3


def test_more_rsa_heads_than_heads_are_refused():
    with pytest.raises(ValueError, match="has 1 attention heads.*6 RSA heads"):
        patch_model(build(num_attention_heads=1), FULL_PLAN)
