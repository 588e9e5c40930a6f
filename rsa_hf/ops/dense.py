"""P V through the explicit P: for masks of any shape, for a few queries behind a cache, and for ONNX graphs.

Quadratic in the length. With z, f and the mask of `boolean_mask`, P[t, s] = f(τ) where query t sees key s, else 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask, boolean_mask, lags
from rsa_hf.ops.powers import weights_of_lags
from rsa_hf.ops.types import ProductGradients, Rems, keys_of_heads, to_value_heads, working_dtype

__all__ = ["dense_backward", "dense_forward"]


def dense_forward(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    """P V, [B, H, T, D], from values [B, Hv, S, D]."""
    visible = _visible(rems, mask)
    return _matrices(rems, mask, visible, working_dtype(value))[0] @ _seen_keys(value, rems, visible)


def dense_backward(grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask) -> ProductGradients:
    """The gradients of `dense_forward`, from the gradient of its output, [B, H, T, D]."""
    dtype, visible = working_dtype(value), _visible(rems, mask)
    grad = grad.to(dtype)
    P, *derivatives = _matrices(rems, mask, visible, dtype, derivatives=True)
    keys = _seen_keys(value, rems, visible)
    dkeys = torch.where(_seen(visible), P.transpose(-1, -2) @ grad, 0)
    drates = [((derivative @ keys) * grad).sum((0, 2, 3)) for derivative in derivatives]
    drates.append(torch.zeros_like(drates[0]))  # θ, if no head is cyclical
    ddecay, dtheta = (drate.to(rems.decay.dtype) for drate in drates[:2])
    return ProductGradients(to_value_heads(dkeys, value, rems.heads_per_value), ddecay, dtheta)


def _matrices(
    rems: Rems, mask: AttentionMask, visible: Tensor, dtype: torch.dtype, derivatives: bool = False
) -> list[Tensor]:
    """P, [1 or B, H, T, S]; with derivatives, also ∂P/∂decay and, where a head is cyclical, ∂P/∂θ."""
    device = rems.decay.device
    tau = lags(mask, device)
    tau = tau.clamp(min=0) if mask.causal else tau.abs()
    # All of P is picked from one table of weights by lag; f(0) = 0.
    table = weights_of_lags(rems, torch.arange(mask.query_length + mask.key_length, device=device), dtype, derivatives)
    return [torch.where(visible, weights[:, tau][None], 0) for weights in table]


def _visible(rems: Rems, mask: AttentionMask) -> Tensor:
    # A mask with a part for each head has one for plain heads too.
    return boolean_mask(mask, lags(mask, rems.decay.device))[:, : len(rems.kinds)]


def _seen(visible: Tensor) -> Tensor:
    """Keys that some query sees: [B or 1, H or 1, S, 1]."""
    return visible.any(dim=-2)[..., None]


def _seen_keys(value: Tensor, rems: Rems, visible: Tensor) -> Tensor:
    # Keys that nobody sees may hold anything, and 0 · NaN would be NaN.
    return torch.where(_seen(visible), keys_of_heads(value, rems), 0)
