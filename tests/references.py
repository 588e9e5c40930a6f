"""References written from the paper's formulas, without the paths that they check."""

import torch

from rsa_hf.ops.reference import dense_rem_product


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


def equation_4(rsa, attention, value, *, heads=None, turns=lambda theta: theta, **masks):
    """Eq. 4 of a layer, computed in float64, with P written out.

    Args:
        rsa: the `RSAHeads`.
        attention: output of softmax attention, [B, T, H, D].
        value: V, [B, Hv, S, D].
        heads: the places of the RSA heads, in place of those of the plan.
        turns: maps θ to angles.
        masks: as for `dense_rem_product`.
    """
    heads, (rems, gate) = list(heads or rsa.spec.heads), rsa.rems_and_gate()
    keys = value.double()[:, [head * value.shape[1] // attention.shape[2] for head in heads]]
    masks = {"query_length": attention.shape[1], **masks}
    product = dense_rem_product(keys, rsa.spec.kinds, rems.decay, turns(rems.theta), rsa.spec.dilations, **masks)
    gate, mixed = gate[:, None], attention.double().clone()
    mixed[:, :, heads] = (1 - gate) * mixed[:, :, heads] + gate * product.transpose(1, 2)
    return mixed.to(attention.dtype)


def relative_error(found, expected):
    """‖found − expected‖ / ‖expected‖."""
    found, expected = found.detach().double(), expected.detach().double()
    scale = expected.norm()
    return float((found - expected).norm() / (scale if scale > 0 else 1))
