"""Temporal Latent Bottleneck against loops, and the modules that get RSA heads."""

import math
from functools import partial

import pytest
import torch

from families import ATTENTIONS
from models import tiny
from models.tiny import CHUNK, attention_by_hand, text, values_and_gradients
from references import relative_error
from rsa_hf.layer import RSAHeads
from rsa_hf.models.interface_attention import sinusoids
from rsa_hf.models.temporal_latent_bottleneck import modeling_temporal_latent_bottleneck as modeling

build = partial(tiny.build, "temporal_latent_bottleneck")


def by_hand(model, tokens):
    return torch.stack([_row(model, row) for row in tokens])


def _row(model, row):
    base, settings = model.model, model.config
    n, table = settings.hidden_size, base.embeddings.weight
    states, logits = torch.zeros(settings.num_states, n, dtype=table.dtype), []
    for chunk in row.split(settings.chunk_size):
        seen = states + _sinusoids(settings.num_states, n)
        x = table[chunk] * math.sqrt(n) + _sinusoids(len(chunk), n)
        for i, layer in enumerate(base.layers, start=1):
            x = x + _self_attention(layer.attention, _normalised(layer.norm, x))
            x = x + _feed_forward(layer.feed_forward, x)
            if i % settings.cross_attention_every == 0:
                x = _cross(layer.cross, x, seen)
        logits.append(_normalised(base.norm, x) @ table.T)
        if len(chunk) == settings.chunk_size:
            states = _normalised(base.slow_norm, _cross(base.slow, seen, x))
    return torch.cat(logits)


def _sinusoids(count, n):
    rates = [10000 ** (-i / n) for i in range(0, n, 2)]
    rows = [[math.sin(t * r) for r in rates] + [math.cos(t * r) for r in rates] for t in range(count)]
    return torch.tensor(rows, dtype=torch.float64)


def _normalised(norm, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def _feed_forward(layers, x):
    inner = _normalised(layers[0], x) @ layers[1].weight.T + layers[1].bias
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    return inner @ layers[3].weight.T + layers[3].bias


def _cross(layer, x, other):
    attention, heads = layer.attention, (layer.attention.config.num_attention_heads, -1)
    key, value = (
        (_normalised(layer.other_norm, other) @ attention.key_value.weight.T).unflatten(-1, (2, *heads)).unbind(1)
    )
    query = (_normalised(layer.norm, x) @ attention.query.weight.T).unflatten(-1, heads)
    x = x + attention_by_hand(attention, query, key, value, "all") @ attention.out.weight.T
    return x + _feed_forward(layer.feed_forward, x)


def _self_attention(module, x):
    qkv = (x @ module.qkv.weight.T).unflatten(-1, (3, module.config.num_attention_heads, -1))
    return attention_by_hand(module, *qkv.unbind(1)) @ module.out.weight.T


@pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_agrees_with_loops(attention, rsa):
    """Values and gradients over four chunks and a part of one, in float64."""
    model, tokens = build(attention, rsa).double(), text(length=23)
    expected = values_and_gradients(model, by_hand(model, tokens))
    found = values_and_gradients(model, model(tokens).logits)
    assert set(found) == set(expected)
    assert {"model.slow.attention.query.weight", "model.layers.1.cross.norm.weight"} < set(found)
    if rsa is not None:
        assert {f"model.layers.2.attention.rsa.{name}" for name in ("mu", "eta", "nu", "theta")} < set(found)
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 1e-5, name


BROKEN = {
    "states are never updated": (modeling, "kept", lambda rows, new, old: old),
    "tokens see all of the chunk": (torch.Tensor, "tril", lambda self, diagonal=0: self),
    "states have no positions": (modeling, "sinusoids", lambda d, n: sinusoids(d, n) * (len(d) == CHUNK)),
    "recurrence is off": (RSAHeads, "forward", lambda self, attention, value, mask: attention),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
@torch.no_grad()
def test_a_broken_model_does_not_agree_with_loops(broken, monkeypatch):
    model, tokens = build(rsa={}).double(), text(length=23)
    expected = by_hand(model, tokens)
    monkeypatch.setattr(*broken)
    assert relative_error(model(tokens).logits, expected) > 1e-2


@pytest.mark.parametrize(
    ("chunk_size", "num_states"), [(2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (4, 3), (4, 4), (9, 4), (9, 9)]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_self_attention_is_patched_and_cross_attention_is_not(chunk_size, num_states, device):
    """Also if a chunk has as many tokens as there are states, so that lengths do not tell the two apart."""
    with torch.device(device):
        model = build(rsa={}, chunk_size=chunk_size, num_states=num_states)
    patched = {name for name, module in model.named_modules() if isinstance(module, RSAHeads)}
    assert patched == {f"model.layers.{i}.attention.rsa" for i in range(3)}
