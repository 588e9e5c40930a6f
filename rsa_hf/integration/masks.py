"""What transformers' attention masks mean: None, 2-D, 4-D, and the keywords of flash attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsa_hf.ops.mask import (
    AttentionMask,
    PackedSegments,
    as_boolean,
    read_mask,
    read_row,
    remembered,
    warn_single_token_segments,
)

__all__ = ["flash_segment_ids", "is_causal", "read_attention_mask"]

# Classes whose `is_causal` is False in encoder and decoder alike: the attribute that says whether a layer is causal.
DIRECTION_ATTRIBUTES = {"InformerAttention": "is_decoder"}


def is_causal(module: nn.Module, keywords: dict[str, Any]) -> bool | None:
    """Direction of an attention call: the `is_causal` keyword, else the module's attribute, else None (unknown)."""
    value = keywords.get("is_causal")
    if value is None:
        value = getattr(module, DIRECTION_ATTRIBUTES.get(type(module).__name__, "is_causal"), None)
    return None if value is None else bool(value)


def read_attention_mask(
    query: Tensor,
    key: Tensor,
    attention_mask: Any,
    *,
    causal: bool,
    aligned_top_left: bool,
    sliding_window: int | None = None,
    segment_ids: Tensor | None = None,
) -> AttentionMask:
    """Read the mask of one attention call.

    Args:
        query: [B, H, T, D].
        key: [B, Hkv, S, D].
        attention_mask: None; 2-D [B, S], nonzero or True for real keys (flash attention), or [B, M] with T ≤ M < S
            if a static cache has slots behind the queries; or 4-D [B or 1, H or 1, T or 1, S], boolean (sdpa) or
            additive (eager).
        causal: direction of the layer.
        aligned_top_left: the meaning of a missing mask if T < S: queries at positions 0 … T−1 (sdpa, True), or the
            last T positions (eager, flash attention). A single query sees every key under both.
        sliding_window: number of positions back that a query sees, itself included, if no mask says so.
        segment_ids: id of each key's packed segment, [B, S], if no mask says so.

    Returns:
        Which keys each query sees.

    Raises:
        TypeError: a mask of an unknown kind, e.g. flex attention's BlockMask.
        ValueError: a mask whose shape does not fit.
    """
    T, S = query.shape[2], key.shape[2]
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"RSA cannot read an attention mask of type {type(attention_mask).__name__}. Allowed: None, or a tensor "
            "as sdpa, eager and flash attention take it. Load the model with attn_implementation='sdpa' or 'eager'."
        )
    if attention_mask is not None and attention_mask.dim() == 4:
        if causal and T == 1:
            # Comparing an inference tensor with its copy would wait for the device; reading a row does not.
            if torch.compiler.is_compiling() or attention_mask.is_inference():
                return read_row(attention_mask, T, S, causal)
            return remembered(read_row, attention_mask, T, S, causal)
        if torch.compiler.is_compiling():
            as_boolean(attention_mask, T, S)
            return AttentionMask(T, S, 0, causal, unread_mask=attention_mask)
        return read_mask(attention_mask, len(query), T, S, causal)
    offset = 0 if aligned_top_left and causal and T > 1 else S - T
    key_mask = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[-1] < T:
            raise ValueError(
                f"RSA cannot read an attention mask of shape {tuple(attention_mask.shape)} for {T} queries and {S} "
                "keys: [batch, keys] or [batch, heads, queries, keys] is needed."
            )
        empty = max(0, S - attention_mask.shape[-1])
        key_mask = F.pad(attention_mask[:, -S:].bool(), (0, empty))
        offset -= empty
    window = sliding_window if sliding_window is not None and sliding_window < S else None
    packed = None if segment_ids is None else PackedSegments(segment_ids)
    return AttentionMask(T, S, offset, causal, key_mask, packed, window)


def flash_segment_ids(query: Tensor, key: Tensor, keywords: dict[str, Any]) -> Tensor | None:
    """Segment ids of packed documents, [1, S], from flash attention's keywords; None if there is one document.

    Args:
        query: [1, H, T, D].
        key: [1, Hkv, S, D].
        keywords: keywords of the attention call: `cu_seq_lens_q`, the start of each document and the end of the last;
            or `position_ids`, [1, T], which start anew with each document (at their smallest: RoBERTa's is not 0).

    Raises:
        NotImplementedError: packed documents in several rows, or behind a cache.
    """
    B, S = len(query), key.shape[2]
    ends = keywords.get("cu_seq_lens_q", keywords.get("cu_seqlens_q"))
    positions = keywords.get("position_ids")
    if ends is not None:
        if query.shape[2] != S or B != 1:
            raise NotImplementedError(
                f"RSA reads packed documents in one row, with as many queries as keys; got {B} rows, "
                f"{query.shape[2]} queries and {S} keys. Use attn_implementation='sdpa'."
            )
        return torch.searchsorted(ends, torch.arange(S, dtype=ends.dtype, device=ends.device), right=True)[None]
    if positions is None or B != 1 or query.shape[2] != S or positions.shape != (1, S):
        return None
    return remembered(_segment_ids_of_positions, positions)


def _segment_ids_of_positions(positions: Tensor) -> Tensor | None:
    begins = positions == positions.min()
    if not bool(begins[:, 1:].any()):
        return None
    if bool(begins.all()):
        warn_single_token_segments()
    return begins.cumsum(dim=1)
