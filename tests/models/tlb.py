"""The Temporal Latent Bottleneck written out in loops."""

import math

import torch

from references import double_loop


def by_hand(model, tokens):
    """Logits of one row after the other, chunk after chunk, query after query."""
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
    attention, other = layer.attention, _normalised(layer.other_norm, other)
    key, value = (other @ attention.key_value.weight.T).chunk(2, -1)
    query = _normalised(layer.norm, x) @ attention.query.weight.T
    x = x + _attention(attention.config, query, key, value, causal=False) @ attention.out.weight.T
    return x + _feed_forward(layer.feed_forward, x)


def _attention(settings, query, key, value, causal):
    """Heads side by side, [T, n]."""
    heads, D = [], settings.hidden_size // settings.num_attention_heads
    for q, k, v in zip(query.split(D, -1), key.split(D, -1), value.split(D, -1), strict=True):
        rows = []
        for t in range(len(q)):
            S = t + 1 if causal else len(k)
            weights = torch.stack([q[t] @ k[s] / math.sqrt(D) for s in range(S)]).softmax(0)
            rows.append(sum(weights[s] * v[s] for s in range(S)))
        heads.append(torch.stack(rows))
    return torch.cat(heads, -1)


def _self_attention(module, x):
    """With RSA heads, where there are any, by the double loop."""
    query, key, value = (x @ module.qkv.weight.T).chunk(3, -1)
    output = _attention(module.config, query, key, value, causal=True)
    if hasattr(module, "rsa"):
        T, H = len(x), module.config.num_attention_heads
        plan, rates = module.rsa.plan, module.rsa.rates()
        decay, theta = module.rsa.per_head(rates)
        R = plan.num_rsa_heads
        values = value.view(1, T, H, -1).transpose(1, 2)[:, :R]
        P_V = double_loop(values, plan.kinds, decay, theta, plan.dilations, T, 0, True)[0].transpose(0, 1)
        output = output.view(T, H, -1)
        mixed = (1 - rates["gate"]) * output[:, :R] + rates["gate"] * P_V
        output = torch.cat([mixed, output[:, R:]], 1).flatten(1)
    return output @ module.out.weight.T
