"""P V through the explicit P: the slow reference, and the exact path for visibility of any shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rsa_hf.rem import rem_matrix

__all__ = ["dense_product"]


def dense_product(
    value: Tensor,
    kinds: Sequence[str],
    decay: Tensor,
    theta: Tensor,
    dilation: Sequence[int],
    query_length: int,
    query_offset: int,
    causal: bool,
    visible: Tensor | None = None,
) -> Tensor:
    """(P ∘ visible) V.

    Args:
        value: shape [B, H, S, D].
        kinds: of length H.
        decay: λ or γ, shape (H,).
        theta: shape (H,).
        dilation: of length H.
        query_length: T.
        query_offset: position of the first query on the key axis.
        causal: masked or unmasked REMs.
        visible: shape [B or 1, H or 1, T, S]; False where query t does not see key s.

    Returns:
        Shape [B, H, T, D], in the dtype of `value`.
    """
    P = rem_matrix(
        kinds,
        decay,
        theta,
        dilation,
        query_length=query_length,
        key_length=value.shape[2],
        query_offset=query_offset,
        causal=causal,
    ).to(value.dtype)
    if visible is None:
        return P @ value
    P = torch.where(visible, P, torch.zeros((), dtype=P.dtype, device=P.device))
    # A hidden key may hold anything; 0 · NaN would be NaN, so keys that no query sees are cleared.
    seen = visible.any(dim=-2)[..., None]
    return P @ torch.where(seen, value, torch.zeros((), dtype=value.dtype, device=value.device))
