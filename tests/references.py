"""References written from the paper's formulas, without the paths that they check."""

import functools

import torch

from rsa_hf.rem import KINDS


def lag_weight(kind, rate, angle, lag):
    """f(τ): λ^τ, γ^τ cos(τθ), γ^τ sin(τθ)."""
    if kind == "regular":
        return rate**lag
    return rate**lag * (torch.cos(lag * angle) if kind == "cos" else torch.sin(lag * angle))


def double_loop(
    value, kinds, decay, theta, dilation, *, weight=lag_weight, query_length=None, query_offset=None, causal=True,
    visible=None,
):  # fmt: skip
    """P V as `rem_product` gives it, in two nested loops. Another `weight(kind, rate, angle, lag)` breaks it."""
    B, _, S, D = value.shape
    T = S if query_length is None else query_length
    start = S - T if query_offset is None else query_offset
    visible = torch.ones(1, 1, T, S) if visible is None else visible
    rows = []
    for h, kind in enumerate(kinds):
        seen = visible[:, h if visible.shape[1] > 1 else 0, ..., None].to(value.dtype)
        f = functools.cache(functools.partial(weight, kind, decay[h], theta[h]))
        for t in range(T):
            row = torch.zeros(B, D, dtype=value.dtype)
            for s in range(S):
                lag = start + t - s if causal else abs(start + t - s)
                if lag >= 1 and lag % dilation[h] == 0:
                    row = row + seen[:, t, s] * f(lag // dilation[h]) * value[:, h, s]
            rows.append(row)
    return torch.stack(rows, dim=1).reshape(B, len(kinds), T, D)


def visible_keys(T, S, *, query_offset=None, causal=True, key_mask=None, documents=None, sliding_window=None):
    """Which keys each query sees, [B or 1, 1, T, S]; documents are numbered."""
    start = S - T if query_offset is None else query_offset
    lags = start + torch.arange(T)[:, None] - torch.arange(S)
    seen = (((lags >= 0) | (not causal)) & (lags.abs() < (sliding_window or T + S)))[None, None]
    if key_mask is not None:
        seen = seen & key_mask.cpu().bool()[:, None, None]
    if documents is not None:
        seen = seen & (documents[:, None, start : start + T, None] == documents[:, None, None]).cpu()
    return seen


def equation_4(rsa, attention, value, *, heads=None, changes=None, visible=None, **masks):
    """Eq. 4 of a layer, computed in float64 from its stored parameters, with P written out.

    Args:
        rsa: the `RSAHeads`.
        attention: output of softmax attention, [B, T, H, D].
        value: V, [B, Hv, S, D].
        heads: the places of the RSA heads, in place of those of the plan.
        changes: functions that are applied to μ, η, ν, θ (scaled) or the free lags [R, K], by name.
        visible: which keys each query sees, [B, 1 or H, T, S], beside what the masks say.
        masks: as for `visible_keys`.
    """
    spec, T, H, S = rsa.spec, *attention.shape[1:3], value.shape[2]
    rows, groups = spec.layout.rows, H // value.shape[1]
    heads = list(heads or spec.layout.heads)

    def stored(name, scale=spec.layout.scale):
        parameter = getattr(rsa, name)
        given = value.new_zeros(0).double() if parameter is None else scale * parameter.double()
        return given if changes is None or name not in changes else changes[name](given)

    eta, theta = stored("eta"), stored("theta")
    places = [row.rate_index if KINDS[row.kind] == "regular" else len(eta) + row.rate_index for row in rows]
    decay = torch.cat([torch.tanh(eta), torch.sigmoid(stored("nu"))])[places]
    angle = torch.cat([torch.zeros_like(eta), theta])[places]
    free_lags = stored("free_lags", 1.0).view(len(heads), -1)
    seen = visible_keys(T, S, **masks).to(value.device)
    seen = (seen if visible is None else seen & visible).expand(-1, H, -1, -1)
    start = masks.get("query_offset", S - T)
    lags = (start + torch.arange(T)[:, None] - torch.arange(S)).abs().to(value.device)
    gate, mixed = torch.sigmoid(stored("mu")).expand(len(heads)), list(attention.double().unbind(2))
    for i, (head, row) in enumerate(zip(heads, rows, strict=True)):
        step = torch.where(lags % row.dilation == 0, lags // row.dilation, 0)
        f = lag_weight(KINDS[row.kind], decay[i], angle[i], step.clamp(min=1))
        for k, weight in enumerate(free_lags[i], 1):
            f = torch.where(step == k, weight, f)
        P = torch.where(seen[:, head] & (step >= 1), f, 0.0)
        mixed[head] = (1 - gate[i]) * mixed[head] + gate[i] * (P @ value[:, head // groups].double())
    return torch.stack(mixed, 2).to(attention.dtype)


def relative_error(found, expected):
    """‖found − expected‖ / ‖expected‖."""
    found, expected = found.detach().double(), expected.detach().double()
    scale = expected.norm()
    return float((found - expected).norm() / (scale if scale > 0 else 1))
