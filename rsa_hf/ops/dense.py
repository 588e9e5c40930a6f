"""P V through the explicit P: slow, and exact for visibility of any shape."""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.ops.mask import Geometry
from rsa_hf.ops.powers import weights_of_lags
from rsa_hf.ops.types import ProductGradients, Recurrence, keys_of_heads, to_value_heads, working_dtype

__all__ = ["dense_backward", "dense_forward"]


def dense_forward(value: Tensor, recurrence: Recurrence, geometry: Geometry) -> Tensor:
    """P V, [B, H, T, D], for any geometry; time and memory O(T·S).

    Args:
        value: shape [B, Hv, S, D].
        recurrence: the heads.
        geometry: who sees whom.
    """
    return _matrices(recurrence, geometry, working_dtype(value))[0] @ _keys(value, recurrence, geometry)


def dense_backward(grad: Tensor, value: Tensor, recurrence: Recurrence, geometry: Geometry) -> ProductGradients:
    """The gradients of `dense_forward`, from the gradient of its output and its own arguments."""
    dtype = working_dtype(value)
    grad = grad.to(dtype)
    matrices = _matrices(recurrence, geometry, dtype, derivatives=True)
    keys = _keys(value, recurrence, geometry)
    dkeys = matrices[0].transpose(-1, -2) @ grad
    seen = _seen(recurrence, geometry, value.device)
    if seen is not None:
        dkeys = torch.where(seen, dkeys, 0)
    drates = [((derivative @ keys) * grad).sum((0, 2, 3)) for derivative in matrices[1:]]
    drates.append(torch.zeros_like(drates[0]))  # θ, where no head is cyclical
    ddecay, dtheta = (drate.to(recurrence.decay.dtype) for drate in drates[:2])
    return ProductGradients(to_value_heads(dkeys, value, recurrence.groups), ddecay, dtheta)


def _matrices(
    recurrence: Recurrence, geometry: Geometry, dtype: torch.dtype, derivatives: bool = False
) -> list[Tensor]:
    """P of what is visible, [1 or B, H, T, S]; with derivatives, also ∂P/∂decay and ∂P/∂θ."""
    device = recurrence.decay.device
    T, S = geometry.query_length, geometry.key_length
    offset = geometry.query_offset if geometry.position is None else geometry.position
    lags = (offset + torch.arange(T, device=device))[:, None] - torch.arange(S, device=device)
    lags = (lags if geometry.causal else lags.abs()).clamp(min=0)
    # One table of weights, from which all of P is picked; lag 0 has no weight and stands for all that have none.
    table = weights_of_lags(recurrence, torch.arange(T + S, device=device), dtype, derivatives)
    visible = _visible(recurrence, geometry)
    if geometry.key_mask is not None:
        keys = geometry.key_mask[:, None, None]
        visible = keys if visible is None else visible & keys
    if geometry.documents is not None:
        index = geometry.documents.index
        rows = index[:, geometry.query_offset : geometry.query_offset + T]
        same = rows[:, None, :, None] == index[:, None, None]
        visible = same if visible is None else visible & same
    if geometry.window is not None:
        lags = torch.where(lags < geometry.window, lags, 0)
    matrices = [weights[:, lags][None] for weights in table]
    return matrices if visible is None else [torch.where(visible, P, 0) for P in matrices]


def _visible(recurrence: Recurrence, geometry: Geometry) -> Tensor | None:
    """Who sees whom, [B or 1, H or 1, T, S]: a mask with a part for each head has one for plain heads too."""
    return None if geometry.visible is None else geometry.visible[:, : len(recurrence.kinds)]


def _seen(recurrence: Recurrence, geometry: Geometry, device: torch.device) -> Tensor | None:
    """Keys that some query sees, [B or 1, H or 1, S, 1]: others may hold anything, and 0 · NaN would be NaN."""
    visible = _visible(recurrence, geometry)
    seen = None if visible is None else visible.any(dim=-2)[..., None]
    if geometry.key_mask is not None:
        keys = geometry.key_mask[:, None, :, None]
        seen = keys if seen is None else seen & keys
    if geometry.causal:
        S, stop = geometry.key_length, geometry.query_offset + geometry.query_length
        if stop < S:
            reached = torch.arange(S, device=device)[:, None] < stop
            seen = reached if seen is None else seen & reached
    return seen


def _keys(value: Tensor, recurrence: Recurrence, geometry: Geometry) -> Tensor:
    keys = keys_of_heads(value, recurrence)
    seen = _seen(recurrence, geometry, value.device)
    return keys if seen is None else torch.where(seen, keys, 0)
