"""Reads an `AttentionMask` from 2-D and 4-D masks, flex attention's BlockMask and flash attention's keywords.

Notation as in `mask.py`: batch B, heads H, queries T, keys S.
"""

import functools
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask, boolean_mask, document_index, lags, remembered
from rsa_hf.rem import is_recorded, is_transformed

# Additive masks hide a key with −inf, the dtype's minimum, or −10,000 in older models, to which a position bias may be
# added; anything above is only a bias.
HIDDEN_AT_OR_BELOW = -9e3


def read_attention_mask(
    attention: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    causal: bool,
    aligned_top_left: bool,
    sliding_window: int | None = None,
    document_ids: Tensor | None = None,
    start: int | None = None,
) -> AttentionMask:
    """Read the mask of one attention call.

    Args:
        attention: its output, [B, T, H, D].
        value: [B, Hv, S, D].
        attention_mask: None; 2-D [B, S], nonzero or True for real keys (flash attention), or [B, M] with T ≤ M < S if
            a static cache has slots after the queries; 4-D [B or 1, H or 1, T or 1, S], boolean (sdpa) or additive
            (eager); or a BlockMask (flex attention; a `score_mod` hides no keys).
        causal: direction of the layer.
        aligned_top_left: the meaning of a missing mask if T < S: queries at positions 0 … T−1 (sdpa, True), or the
            last T positions (eager, flash attention). A single query sees every key under both.
        sliding_window: number of positions that a query sees back, itself included, if no mask shows it.
        document_ids: id of each key's packed document, [B, S], if no mask shows it.
        start: position of the first query by `position_ids`, if they are known.

    Returns:
        Which keys each query sees.

    Raises:
        TypeError: a mask of an unknown kind.
        ValueError: a mask whose shape does not fit.
    """
    T, S = attention.shape[1], value.shape[2]
    if hasattr(attention_mask, "mask_mod"):
        attention_mask = evaluate_block_mask(attention_mask, attention, S)
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"RSA cannot read an attention mask of type {type(attention_mask).__name__}. Allowed: None, a tensor, or "
            "flex attention's BlockMask. Load the model with attn_implementation='sdpa' or 'eager'."
        )
    if attention_mask is not None and attention_mask.dim() == 4:
        # Values are not known in a graph, and may be batched in a transform of torch.func.
        not_read = is_recorded() or is_transformed()
        if causal and T == 1 and (not_read or not attention_mask.is_cpu):
            # Comparing an inference tensor with its copy would wait for the device; reading a row does not.
            if not_read or attention_mask.is_inference():
                return read_row(attention_mask, T, S, causal)
            return remembered(read_row, attention_mask, T, S, causal)
        if not_read:
            as_boolean(attention_mask, T, S)
            return AttentionMask(T, S, 0, causal, unread_mask=attention_mask)
        return remembered(read_mask, attention_mask, T, S, causal, start)
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
    packed = None if document_ids is None else document_index(document_ids)
    return AttentionMask(T, S, offset, causal, key_mask, packed, window)


def flash_document_ids(attention: Tensor, value: Tensor, keywords: Mapping[str, Any]) -> Tensor | None:
    """Document ids of packed documents, [1, S], from flash attention's keywords; None if there is one document.

    The keywords are `cu_seq_lens_q`, the start of each document and the end of the last, which raises a
    NotImplementedError for several rows or after cached keys; or `position_ids`, [1, T], which restart with each
    document (at their minimum: RoBERTa's is not 0) and mark none for several rows or after cached keys.
    """
    (B, T), S = attention.shape[:2], value.shape[2]
    ends = keywords.get("cu_seq_lens_q", keywords.get("cu_seqlens_q"))
    positions = keywords.get("position_ids")
    if ends is not None:
        if T != S or B != 1:
            raise NotImplementedError(
                f"RSA reads packed documents in one row, with as many queries as keys; got {B} rows, "
                f"{T} queries and {S} keys. Use attn_implementation='sdpa'."
            )
        return torch.searchsorted(ends, torch.arange(S, dtype=ends.dtype, device=ends.device), right=True)[None]
    if positions is None or B != 1 or T != S or positions.shape != (1, S):
        return None
    return remembered(_document_ids_of_positions, positions)


def _document_ids_of_positions(positions: Tensor) -> Tensor | None:
    begins = positions == positions.min()
    if not bool(begins[:, 1:].any()):
        return None
    return begins.cumsum(dim=1)


def as_boolean(mask: Tensor, T: int, S: int) -> Tensor:
    """A 4-D mask, boolean or additive, as a boolean one for S keys; a ValueError if its shape does not fit."""
    if mask.shape[-1] < S or mask.shape[-2] not in (1, T):
        raise ValueError(
            f"RSA cannot read an attention mask of shape {tuple(mask.shape)} for {T} queries and {S} keys: "
            "[batch, heads, queries, keys] is needed."
        )
    mask = mask.detach()[..., :S]
    return mask if mask.dtype == torch.bool else mask > HIDDEN_AT_OR_BELOW


def evaluate_block_mask(block_mask: Any, attention: Tensor, key_length: int) -> Tensor:
    """Which keys each query sees under flex attention, boolean, [B or 1, H or 1, T, S]; `attention` is its output.

    Flex attention shows the keys of full blocks, asks `mask_mod` in partial blocks, and skips all others. The mask is
    evaluated in every call, because tensors that `mask_mod` reads may have changed. As long as nothing has, the same
    tensor is returned, so that it is read once for all layers of a forward.
    """
    from torch.nn.attention.flex_attention import create_mask  # slow to import

    (B, T, H), S = attention.shape[:3], key_length
    mask_mod = block_mask.mask_mod
    if torch.compiler.is_compiling():
        if T < S:
            raise NotImplementedError("RSA cannot read flex attention's mask of a cache in a graph. Use 'sdpa' there.")
    elif _is_late(mask_mod):
        mask_mod = functools.partial(_earlier, mask_mod, T)
    visible = create_mask(mask_mod, B, H, T, S, attention.device)
    # vmap expands along an index that `mask_mod` ignores: one row or head is enough then.
    visible = visible[: B if visible.stride(0) else 1, : H if visible.stride(1) else 1]
    visible = visible & _in_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.BLOCK_SIZE, T, S)
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if full[0] is not None:
        visible = visible | _in_blocks(*full, block_mask.BLOCK_SIZE, T, S)
    if T == 1 or torch.compiler.is_compiling():  # comparing waits for the device, here at each token
        return visible
    known = _evaluated.get(block_mask)
    if known is None or known.is_inference() != visible.is_inference() or not torch.equal(known, visible):
        _evaluated[block_mask] = known = visible
    return known


def _earlier(mask_mod: Any, T: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    return mask_mod(b, h, q - T, k)


def _is_late(mask_mod: Any) -> bool:
    """Whether a `mask_mod` takes its queries for those after them.

    transformers' own reads the place of the queries from the tensor in which a static cache counts its keys, and which
    counts those of the queries by the time of attention.
    """
    names = getattr(getattr(mask_mod, "__code__", None), "co_freevars", ())
    return "q_offset" in names and isinstance(mask_mod.__closure__[names.index("q_offset")].cell_contents, Tensor)


# The last answer of `evaluate_block_mask` for each BlockMask, for as long as the BlockMask exists.
_evaluated: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()


def _in_blocks(count: Tensor, index: Tensor, block_size: tuple[int, int], T: int, S: int) -> Tensor:
    """Whether a query and a key are in a listed block, [B or 1, H or 1, T, S].

    `count` is the number of blocks of each row of blocks, [B or 1, H or 1, rows], and `index` begins with their
    columns, [B or 1, H or 1, rows, columns]; the rest of it is undefined.
    """
    height, width = min(block_size[0], T), min(block_size[1], S)
    listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    blocks = torch.zeros(*index.shape[:-1], -(-S // width), device=index.device, dtype=torch.long)
    blocks = blocks.scatter_add(-1, torch.where(listed, index, 0).long(), listed.long()) > 0
    if T > 1 and not torch.compiler.is_compiling():
        for axis in (0, 1):
            first = blocks.narrow(axis, 0, 1)
            blocks = first if torch.equal(blocks, first.expand_as(blocks)) else blocks
    return blocks.repeat_interleave(height, 2).repeat_interleave(width, 3)[..., :T, :S]


def read_row(mask: Tensor, T: int, S: int, causal: bool) -> AttentionMask:
    """Read the mask of a single causal query without looking at its values, so nothing waits for the device.

    The query sees itself and nothing after itself, so the last slot that any row sees is its position. That also holds
    in a static cache, which has slots after it.
    """
    visible = as_boolean(mask, T, S).clone()
    slots = torch.arange(S, device=mask.device)
    position = torch.where(visible, slots, 0).flatten().amax(0)  # ONNX has no maximum over all axes at once
    # Also given as an unread mask, which is what the operator in a graph takes.
    return AttentionMask(T, S, S - 1, causal, visible=visible, query_position=position, unread_mask=visible)


def read_traced(mask: AttentionMask) -> AttentionMask:
    """The same mask with `visible` and `query_position` instead of an unread mask, without looking at its values."""
    if mask.unread_mask is None or mask.query_position is not None:
        return mask
    T, S = mask.query_length, mask.key_length
    visible = as_boolean(mask.unread_mask, T, S)
    position = query_position(visible, T, S, mask.causal) if mask.causal or T < S else None
    return AttentionMask(T, S, S - T, mask.causal, visible=visible, query_position=position)


def read_mask(mask: Tensor, T: int, S: int, causal: bool, start: int | None = None) -> AttentionMask:
    """Read a 4-D mask, [B or 1, H or 1, T or 1, S or more]; a ValueError if its shape does not fit.

    `start` is the position of the first query by `position_ids`, if they are known.
    """
    visible = as_boolean(mask, T, S)
    if mask.is_meta:
        return AttentionMask(T, S, S - T, causal)  # only shapes are computed from it

    def explains(candidate: AttentionMask) -> bool:
        shown = boolean_mask(candidate, lags(candidate, mask.device))
        return torch.equal(visible, shown.expand(*visible.shape[:2], T, S))

    visible = visible.expand(-1, -1, T, S)
    found = AttentionMask(T, S, S - T, causal)
    if explains(found):
        return found
    if visible.shape[1] > 1 and bool((visible == visible[:, :1]).all()):
        visible = visible[:, :1]
    offset = S - T
    if T < S and visible.numel():
        offset = int(query_position(visible, T, S, causal, start))
    if visible.shape[1] == 1:
        key_mask = visible[:, 0].any(dim=1)
        found = AttentionMask(T, S, offset, causal, None if bool(key_mask.all()) else key_mask)
        if explains(found):
            return found
        window = int(torch.where(visible, lags(found, mask.device).abs(), 0).amax()) + 1
        windowed = replace(found, sliding_window=window)
        if explains(windowed):
            return windowed
        documents = _documents(visible[:, 0], key_mask, offset)
        for packed in (replace(found, documents=documents), replace(windowed, documents=documents)):
            if explains(packed):
                return packed
    if T > 1:  # Python shows a warning of the same text and place only once
        warnings.warn(
            "unsupported mask: it does not combine direction, padding, packed documents and a sliding window. P is "
            "built explicitly, at quadratic cost.",
            stacklevel=2,
        )
    return AttentionMask(T, S, offset, causal, visible=visible.clone())


def _documents(visible: Tensor, key_mask: Tensor, offset: int) -> Tensor:
    """Documents, [B, S], assuming that the mask, [B, T, S], is one of packed rows.

    A document begins at a query that does not see the last real key before it. The caller checks the assumption.
    """
    B, T, S = visible.shape
    positions = torch.arange(S, device=visible.device)
    last_real = torch.where(key_mask, positions, -1).cummax(dim=1).values
    before = F.pad(last_real[:, :-1], (1, 0), value=-1)[:, offset : offset + T]
    sees_it = visible.gather(2, before.clamp(min=0)[..., None])[..., 0]
    begins = torch.zeros(B, S, dtype=torch.bool, device=visible.device)
    # Padding inside a document does not begin a new one; padding whose query sees nothing is a document of its own.
    real = key_mask[:, offset : offset + T] | ~visible.any(dim=2)
    begins[:, offset : offset + T] = (before >= 0) & ~sees_it & real
    return begins.cumsum(dim=1)


def query_position(visible: Tensor, T: int, S: int, causal: bool, start: int | None = None) -> Tensor:
    """Position of the first query on the key axis, from a mask, without waiting for its values: ().

    A query sees itself. So each of the T queries is at a slot whose key it sees, unless that key is padding, which no
    query sees. Several places may fit; the last one is right, because queries also see the keys before them. The
    farthest visible key does not determine the position: in an image or a prefix, where tokens see ahead, it belongs
    to another token, and a query that is padding does not see as far as its own slot.

    If the first query sees as far as any other, as in one prefix, the mask is the same however much of its end is
    padding. Then the last query that sees anything is taken for a token, at the last visible key. The first query is
    taken instead, and all queries after it are padding, if a cache without free slots has it at that key, and the
    layer is causal or the cache had as many keys before as there are queries; but not if `start`, its position by
    `position_ids`, which may count padding on the left or not, is that of the other place alone.
    """
    visible = visible.expand(-1, -1, T, S).flatten(0, 1)
    slots = torch.arange(S, device=visible.device)
    seen = visible.any(dim=1)
    last = torch.where(seen, slots, 0).max()
    # [T, S]: True where a query cannot be at a slot, in some row.
    misfits = (seen[:, None] & ~visible).any(dim=0)
    # Column i of this skewed matrix is the diagonal on which the first query is at slot i.
    diagonals = F.pad(misfits.flatten(), (0, T)).view(T, S + 1)[:, : S - T + 1]
    places = slots[: S - T + 1]
    counts = torch.where(places <= last, diagonals.sum(dim=0), T + 1)
    fitting = torch.where(counts == counts.min(), places, 0).max()
    last_query = torch.where(visible.any(dim=2).any(dim=0), torch.arange(T, device=visible.device), 0).max()
    is_determined = (misfits[0] & (slots == last)).any()
    is_first = (last == S - T) & (causal | (last >= T))
    other = (last - last_query).clamp(0, S - T)
    if start is not None:
        unpadded = start + seen.any(dim=0).int().argmax()
        is_first &= (last == start) | (last == unpadded) | ((other != start) & (other != unpadded))
    return torch.where(is_determined | is_first, fitting, other)
