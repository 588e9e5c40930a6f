"""P V through the explicit P: slow, and exact for visibility of any shape."""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.powers import weights_of_lags
from rsa_hf.ops.types import ProductGradients, Rems, keys_of_heads, to_value_heads, working_dtype

__all__ = ["dense_backward", "dense_forward"]


def dense_forward(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    """P V, [B, H, T, D], for any geometry; time and memory O(T·S).

    Args:
        value: shape [B, Hv, S, D].
        rems: the heads.
        mask: who sees whom.
    """
    return _matrices(rems, mask, working_dtype(value))[0] @ _keys(value, rems, mask)


def dense_backward(grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask) -> ProductGradients:
    """The gradients of `dense_forward`, from the gradient of its output and its own arguments."""
    dtype = working_dtype(value)
    grad = grad.to(dtype)
    matrices = _matrices(rems, mask, dtype, derivatives=True)
    keys = _keys(value, rems, mask)
    dkeys = matrices[0].transpose(-1, -2) @ grad
    seen = _seen(rems, mask, value.device)
    if seen is not None:
        dkeys = torch.where(seen, dkeys, 0)
    drates = [((derivative @ keys) * grad).sum((0, 2, 3)) for derivative in matrices[1:]]
    drates.append(torch.zeros_like(drates[0]))  # θ, where no head is cyclical
    ddecay, dtheta = (drate.to(rems.decay.dtype) for drate in drates[:2])
    return ProductGradients(to_value_heads(dkeys, value, rems.heads_per_value), ddecay, dtheta)


def _matrices(rems: Rems, mask: AttentionMask, dtype: torch.dtype, derivatives: bool = False) -> list[Tensor]:
    """P of what is visible, [1 or B, H, T, S]; with derivatives, also ∂P/∂decay and ∂P/∂θ."""
    device = rems.decay.device
    T, S = mask.query_length, mask.key_length
    offset = mask.query_offset if mask.query_position is None else mask.query_position
    lags = (offset + torch.arange(T, device=device))[:, None] - torch.arange(S, device=device)
    lags = (lags if mask.causal else lags.abs()).clamp(min=0)
    # One table of weights, from which all of P is picked; lag 0 has no weight and stands for all that have none.
    table = weights_of_lags(rems, torch.arange(T + S, device=device), dtype, derivatives)
    visible = _visible(rems, mask)
    if mask.key_mask is not None:
        keys = mask.key_mask[:, None, None]
        visible = keys if visible is None else visible & keys
    if mask.segments is not None:
        index = mask.segments.index
        rows = index[:, mask.query_offset : mask.query_offset + T]
        same = rows[:, None, :, None] == index[:, None, None]
        visible = same if visible is None else visible & same
    if mask.sliding_window is not None:
        lags = torch.where(lags < mask.sliding_window, lags, 0)
    matrices = [weights[:, lags][None] for weights in table]
    return matrices if visible is None else [torch.where(visible, P, 0) for P in matrices]


def _visible(rems: Rems, mask: AttentionMask) -> Tensor | None:
    """Who sees whom, [B or 1, H or 1, T, S]: a mask with a part for each head has one for plain heads too."""
    return None if mask.visible is None else mask.visible[:, : len(rems.kinds)]


def _seen(rems: Rems, mask: AttentionMask, device: torch.device) -> Tensor | None:
    """Keys that some query sees, [B or 1, H or 1, S, 1]: others may hold anything, and 0 · NaN would be NaN."""
    visible = _visible(rems, mask)
    seen = None if visible is None else visible.any(dim=-2)[..., None]
    if mask.key_mask is not None:
        keys = mask.key_mask[:, None, :, None]
        seen = keys if seen is None else seen & keys
    if mask.causal:
        S, stop = mask.key_length, mask.query_offset + mask.query_length
        if stop < S:
            reached = torch.arange(S, device=device)[:, None] < stop
            seen = reached if seen is None else seen & reached
    return seen


def _keys(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    keys = keys_of_heads(value, rems)
    seen = _seen(rems, mask, value.device)
    return keys if seen is None else torch.where(seen, keys, 0)
