"""P V in plain operators with no look at any value, for graphs that leave PyTorch: ONNX.

There the operator of `operator.py` has no meaning, and the scan's loops over chunks would be unrolled for one length.
So P is built, as attention builds its own T·S scores; the lengths stay symbols, and what a mask says stays a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.ops.mask import HIDDEN_AT_OR_BELOW, AttentionMask, query_position
from rsa_hf.ops.powers import weights_of_lags
from rsa_hf.ops.types import Rems, SoftmaxBranch, keys_of_heads, working_dtype

__all__ = ["traced_forward"]


def traced_forward(value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None) -> Tensor:
    """P V, [B, H, T, D], or, with `softmax`, attention + g (P V − attention), [B, T, H', D].

    Args:
        value: V, shape [B, Hv, S, D].
        rems: the heads.
        mask: who sees whom; its `mask` may be one that nobody has looked into yet.
        softmax: softmax attention and the gate, or None.
    """
    T, S, device = mask.query_length, mask.key_length, value.device
    dtype = working_dtype(value)
    visible = mask.visible
    slots = torch.arange(S, device=device)
    offset: int | Tensor = mask.query_offset if mask.query_position is None else mask.query_position
    if mask.unread_mask is not None and mask.query_position is None:
        shown = mask.unread_mask[..., :S]
        visible = shown if shown.dtype == torch.bool else shown > HIDDEN_AT_OR_BELOW
        offset = query_position(visible, T, S) if mask.causal else S - T
    lags = (offset + torch.arange(T, device=device))[:, None] - slots
    lags = lags if mask.causal else lags.abs()
    if mask.sliding_window is not None:
        lags = torch.where(lags < mask.sliding_window, lags, 0)
    if mask.key_mask is not None:
        keys = mask.key_mask[:, None, None]
        visible = keys if visible is None else visible & keys
    if mask.segments is not None:
        index = mask.segments.index
        rows = index[:, mask.query_offset : mask.query_offset + T]
        same = rows[:, None, :, None] == index[:, None, None]
        visible = same if visible is None else visible & same
    P = weights_of_lags(rems, lags.flatten(), dtype)[0].unflatten(1, (T, S))[None]
    keys = keys_of_heads(value, rems)
    if visible is not None:
        P = torch.where(visible, P, 0)
        # A key that nobody sees may hold anything, and 0 · NaN would be NaN.
        keys = torch.where(visible.any(dim=-2)[..., None], keys, 0)
    product: Tensor = P @ keys
    if softmax is None:
        return product
    H, attention = len(rems.kinds), softmax.attention
    mixed = torch.lerp(attention[:, :, :H].to(dtype), product.transpose(1, 2), softmax.gate[:, None].to(dtype))
    return torch.cat([mixed.to(attention.dtype), attention[:, :, H:]], dim=2)
