"""The Block-Recurrent Transformer against loops over windows and tokens; its states and its initialisation."""

from functools import partial

import pytest
import torch

from models import tiny
from models.tiny import WINDOW, attention_by_hand, text, values_and_gradients
from references import relative_error

build = partial(tiny.build, "block-recurrent")
H, D = 8, 4


def rms(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def tokens_see(module, query, key, value):
    """Attention of tokens [T, H, D] to the last W tokens."""
    # Buckets of distances: 0, 1, 2 to 3 (2 · √3 = 3.5), and the rest.
    bias = [module.relative_bias.weight[min(i, 2 + (i > 3)) if i > 1 else i] for i in range(WINDOW)]
    last = lambda t: range(max(0, t - WINDOW + 1), t + 1)  # noqa: E731
    return attention_by_hand(module, query, key, value, last, lambda t, s: bias[t - s])


def gated(gate, state, h, kind):
    z = h @ gate.input.weight.T + gate.input.bias
    if kind == "fixed":
        g = torch.sigmoid(gate.bias)
        return state * g + z * (1 - g)
    i, f = (h @ gate.gates.weight.T + gate.gates.bias).chunk(2, -1)
    return state * torch.sigmoid(f + 1) + torch.tanh(z) * torch.sigmoid(i - 1)


def next_state(cell, state, h, kind):
    if cell.cell == "single":
        return gated(cell.ff_gate, state, torch.relu(h @ cell.ff_in.weight.T), kind)
    state = gated(cell.attn_gate, state, h, kind)
    if cell.cell == "skip":
        return state
    return gated(cell.ff_gate, state, torch.relu(rms(state, cell.ff_norm) @ cell.ff_in.weight.T), kind)


def recurrent_layer(module, x, kind, late):
    """The tokens of one row [T, d_model], window by window; `late` breaks it: tokens see states one window late."""
    cell = module.states
    q, q_states, k, v = (x @ module.qqkv_proj.weight.T).view(-1, 4, H, D).unbind(1)
    heads, out = tokens_see(module, q, k, v), []
    states = before = cell.initial_state

    def projected(states):
        return ((rms(states, cell.norm) + cell.state_ids) @ cell.qqkv_proj.weight.T).view(-1, 4, H, D).unbind(1)

    for begin in range(0, len(x), WINDOW):
        window, near = slice(begin, begin + WINDOW), slice(max(0, begin - WINDOW), begin + WINDOW)
        seen, (to_states, to_tokens, key, value) = projected(before if late else states), projected(states)
        across = attention_by_hand(None, q_states[window], *seen[2:], "all")
        out.append(torch.cat([heads[window], across], 1) @ module.o_proj.weight.T)
        if begin + WINDOW > len(x):
            break
        own = attention_by_hand(None, to_states, key, value, "all")
        tokens = attention_by_hand(None, to_tokens, k[near], v[near], "all")
        before, states = states, next_state(cell, states, torch.cat([own, tokens], 1), kind)
    return torch.cat(out)


def written_out(model, row, late=False):
    """The logits of one row of tokens, as loops."""
    hidden = model.model.embed_tokens.weight[row]
    for layer in model.model.layers:
        x = rms(hidden, layer.attn_norm)
        if hasattr(layer.attn, "states"):
            hidden = hidden + recurrent_layer(layer.attn, x, model.config.gate, late)
        else:
            qkv = (x @ layer.attn.qkv_proj.weight.T).view(-1, 3, H, D).unbind(1)
            hidden = hidden + tokens_see(layer.attn, *qkv) @ layer.attn.o_proj.weight.T
        inner = torch.relu(rms(hidden, layer.ff_norm) @ layer.ff_in.weight.T)
        hidden = hidden + inner @ layer.ff_out.weight.T
    return rms(hidden, model.model.norm) @ model.lm_head.weight.T


@pytest.mark.parametrize(
    ("cell", "gate", "rsa", "attention"),
    [
        ("skip", "fixed", None, "sdpa"),
        ("single", "lstm", None, "eager"),
        ("dual", "fixed", {}, "sdpa"),
        ("dual", "lstm", {}, "eager"),
        ("single", "fixed", {}, "sdpa"),
    ],
)
def test_agrees_with_loops_over_windows_and_tokens(cell, gate, rsa, attention):
    """Logits and the gradient of every parameter, over two full windows and a part."""
    model, row = build(attention, rsa, cell=cell, gate=gate).double(), text(batch=1, length=2 * WINDOW + 3)[0]
    found = values_and_gradients(model, model(row[None]).logits[0])
    expected = values_and_gradients(model, written_out(model, row))
    assert expected.keys() == found.keys()
    assert len(found) == 1 + len(list(model.parameters()))
    for name, value in expected.items():
        # RSA's parameters and the softmax of eager attention are float32 in a float64 model.
        assert relative_error(found[name], value) <= (1e-9 if rsa is None and attention == "sdpa" else 5e-6), name
    assert relative_error(found["output"], written_out(model, row, late=True).detach()) > 1e-3


def test_the_initialisation_is_the_published_one():
    model = build(gate="fixed", d_model=256, d_head=32, num_state_vectors=64)
    cell = model.model.layers[1].attn.states
    assert float(cell.attn_gate.bias.detach().std()) == pytest.approx(0.1, rel=0.2)
    assert float(cell.attn_gate.bias.detach().sigmoid().mean()) == pytest.approx(0.5, abs=0.02)
    assert float(cell.initial_state.detach().std()) == pytest.approx(0.1, rel=0.05)
    assert float(cell.state_ids.detach().std()) == pytest.approx(1.0, rel=0.05)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name.split(".")[-2].endswith(("_proj", "_in", "_out", "input")):
            assert float(parameter.detach().std()) == pytest.approx(parameter.shape[1] ** -0.5, rel=0.15), name
    table = model.model.layers[0].attn.relative_bias.weight.detach()
    assert float(table.std()) == pytest.approx(len(table) ** -0.5, rel=0.4)
    gates = build(gate="lstm", d_model=256, d_head=32).model.layers[1].attn.states.attn_gate.gates
    assert float(gates.weight.detach().std()) == pytest.approx((0.1 / 512) ** 0.5, rel=0.15)
    assert float(gates.bias.detach().std()) == pytest.approx(0.1, rel=0.2)
