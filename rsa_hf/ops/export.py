"""P V in plain operators with no look at any value, for graphs that leave PyTorch: ONNX.

There the operator of `operator.py` has no meaning, and the scan's loops over chunks would be unrolled for one length.
So P is built, as attention builds its own T·S scores; the lengths stay symbols, and what a mask says stays a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.ops.mask import HIDDEN_AT_OR_BELOW, Geometry, query_position
from rsa_hf.ops.powers import weights_of_lags
from rsa_hf.ops.types import Mixing, Recurrence, keys_of_heads, working_dtype

__all__ = ["traced_forward"]


def traced_forward(value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None) -> Tensor:
    """P V, [B, H, T, D], or, with `mixing`, attention + g (P V − attention), [B, T, H', D].

    Args:
        value: V, shape [B, Hv, S, D].
        recurrence: the heads.
        geometry: who sees whom; its `mask` may be one that nobody has looked into yet.
        mixing: softmax attention and the gate, or None.
    """
    T, S, device = geometry.query_length, geometry.key_length, value.device
    dtype = working_dtype(value)
    visible = geometry.visible
    slots = torch.arange(S, device=device)
    offset: int | Tensor = geometry.query_offset if geometry.position is None else geometry.position
    if geometry.mask is not None and geometry.position is None:
        shown = geometry.mask[..., :S]
        visible = shown if shown.dtype == torch.bool else shown > HIDDEN_AT_OR_BELOW
        offset = query_position(visible, T, S) if geometry.causal else S - T
    lags = (offset + torch.arange(T, device=device))[:, None] - slots
    lags = lags if geometry.causal else lags.abs()
    if geometry.window is not None:
        lags = torch.where(lags < geometry.window, lags, 0)
    if geometry.key_mask is not None:
        keys = geometry.key_mask[:, None, None]
        visible = keys if visible is None else visible & keys
    if geometry.documents is not None:
        index = geometry.documents.index
        rows = index[:, geometry.query_offset : geometry.query_offset + T]
        same = rows[:, None, :, None] == index[:, None, None]
        visible = same if visible is None else visible & same
    P = weights_of_lags(recurrence, lags.flatten(), dtype)[0].unflatten(1, (T, S))[None]
    keys = keys_of_heads(value, recurrence)
    if visible is not None:
        P = torch.where(visible, P, 0)
        # A key that nobody sees may hold anything, and 0 · NaN would be NaN.
        keys = torch.where(visible.any(dim=-2)[..., None], keys, 0)
    product: Tensor = P @ keys
    if mixing is None:
        return product
    H, attention = len(recurrence.kinds), mixing.attention
    mixed = torch.lerp(attention[:, :, :H].to(dtype), product.transpose(1, 2), mixing.gate[:, None].to(dtype))
    return torch.cat([mixed.to(attention.dtype), attention[:, :, H:]], dim=2)
