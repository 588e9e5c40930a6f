"""References that share no code with the package, written from the paper's formulas."""

import math

import torch


def double_loop(value, kinds, decay, theta, dilation, T, offset, causal, visible=None, weight=None):
    """Compute P V in two nested loops over queries and keys. Another `weight(kind, rate, angle, lag)` breaks it."""
    weight = weight or lag_weight
    B, _, S, D = value.shape
    rows = []
    for h, kind in enumerate(kinds):
        for t in range(T):
            row = torch.zeros(B, D, dtype=value.dtype)
            for s in range(S):
                lag = offset + t - s
                if not causal:
                    lag = abs(lag)
                if lag < 1 or lag % dilation[h]:
                    continue
                f = weight(kind, decay[h], theta[h], lag // dilation[h])
                seen = 1.0 if visible is None else visible[:, 0, t, s].to(value.dtype)[:, None]
                row = row + seen * f * value[:, h, s]
            rows.append(row)
    return torch.stack(rows, dim=1).reshape(B, len(kinds), T, D)


def lag_weight(kind, rate, angle, lag):
    """f(τ): λ^τ, γ^τ cos(τθ), γ^τ sin(τθ)."""
    if kind == "regular":
        return rate**lag
    return rate**lag * (torch.cos(lag * angle) if kind == "cos" else torch.sin(lag * angle))


def rsa_attention(query, key, value, gate, P, causal, scaling=None):
    """Equation 4 of the paper, with both T×S matrices."""
    T, S, D = query.shape[2], key.shape[2], query.shape[3]
    scores = query @ key.transpose(-1, -2) * (D**-0.5 if scaling is None else scaling)
    if causal:
        hidden = torch.arange(S)[None, :] > (S - T + torch.arange(T))[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    return ((1 - gate) * scores.softmax(-1) + gate * P) @ value


def relative_error(found, expected):
    """‖found − expected‖ / ‖expected‖."""
    found, expected = found.detach().double(), expected.detach().double()
    scale = expected.norm()
    return float((found - expected).norm() / (scale if scale > 0 else 1))
