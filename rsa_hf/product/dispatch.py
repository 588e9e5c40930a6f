"""`rem_product`: the one entry to P V. It checks its arguments and chooses the path that computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rsa_hf.product.chunked import chunked_product
from rsa_hf.product.dense import dense_product
from rsa_hf.rem import head_tensors

__all__ = ["rem_product"]


def rem_product(
    value: Tensor,
    kinds: str | Sequence[str],
    decay: float | Sequence[float] | Tensor,
    theta: float | Sequence[float] | Tensor = 0.0,
    dilation: int | Sequence[int] = 1,
    *,
    query_length: int | None = None,
    query_offset: int | None = None,
    causal: bool = True,
    groups: int = 1,
    key_mask: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """P V for every head, the recurrent half of paper eq. 4.

    Time and memory are linear in the length wherever no `visible` is given.

    Args:
        value: V, shape [B, Hv, S, D], any floating dtype. Head h reads value head h // groups.
        kinds: the kind of each of the H heads (`"regular"`, `"cos"`, `"sin"`), or one for all.
        decay: λ (regular) or γ (cyclical) of each head, shape (H,), or one for all.
        theta: θ of each cyclical head in radians, shape (H,), or one for all.
        dilation: d of each head, or one for all.
        query_length: T; default S.
        query_offset: position of the first query on the key axis; default S − T: the queries come last.
        causal: masked (True) or unmasked (False) REMs.
        groups: number of heads that share a value head (grouped-query attention).
        key_mask: shape [B or 1, S], False for keys that contribute nothing (padding).
        visible: shape [B or 1, H or 1, T, S], False where query t does not see key s (packed documents, windows).
            Exact, at the dense cost of O(T·S).

    Returns:
        P V, shape [B, H, T, D]; float64 for float64 values, else float32, in which it is computed.

    Raises:
        ValueError: an unknown kind, a dilation below 1, lengths or heads that do not fit `value`.
    """
    if value.dim() != 4:
        raise ValueError(f"value has shape {tuple(value.shape)}; [B, H, S, D] is needed.")
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    kinds, decay, theta, dilation = head_tensors(kinds, decay, theta, dilation)
    decay, theta = decay.to(value.device), theta.to(value.device)
    H, S = len(kinds), value.shape[2]
    T = S if query_length is None else query_length
    offset = S - T if query_offset is None else query_offset
    if groups < 1 or value.shape[1] * groups < H:
        raise ValueError(
            f"{H} heads do not fit {value.shape[1]} value heads shared by groups={groups} heads each: "
            f"at most {value.shape[1] * max(groups, 1)} are possible."
        )
    if not 0 <= offset <= S - T:
        raise ValueError(
            f"queries at positions {offset} … {offset + T - 1} do not lie on a key axis of length {S}: "
            f"query_offset must be between 0 and S − T = {S - T}."
        )
    # Decay powers and sums lose too much in half precision, so autocast stays out.
    with torch.autocast(value.device.type, enabled=False):
        value = _values_of_heads(value, H, groups).to(dtype)
        if key_mask is not None:
            # where, not a product: hidden slots may hold anything, NaN included.
            value = torch.where(key_mask[:, None, :, None], value, torch.zeros((), dtype=dtype, device=value.device))
        if visible is not None or (not causal and T != S):
            return dense_product(value, kinds, decay, theta, dilation, T, offset, causal, visible)
        return chunked_product(value, kinds, decay, theta, dilation, T, offset, causal)


def _values_of_heads(value: Tensor, H: int, groups: int) -> Tensor:
    if groups == 1:
        return value[:, :H]
    index = torch.arange(H, device=value.device) // groups
    return value.index_select(1, index)
