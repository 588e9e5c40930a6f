"""Which keys each query sees: `AttentionMask`, its boolean form, and how 4-D masks and block masks are read.

Notation: batch B, heads H, queries T, keys S; queries are positions `query_offset … query_offset + T − 1` of the key
axis. A query takes no part in a recurrence over keys that attention hides from it, so P is masked as attention is.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.rem import is_recorded

__all__ = [
    "HIDDEN_AT_OR_BELOW",
    "AttentionMask",
    "as_boolean",
    "boolean_mask",
    "evaluate_block_mask",
    "lags",
    "query_position",
    "read_mask",
    "read_row",
    "read_traced",
    "remembered",
    "segment_index",
    "warn_single_token_segments",
]

Answer = TypeVar("Answer")
# Additive masks hide a key with −inf, the dtype's minimum, or −10,000 in older models; anything above is a bias.
HIDDEN_AT_OR_BELOW = -1e4
LARGE = 2**13  # bytes of a mask from which comparing eight at a time takes less time than one by one


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys each query sees.

    Attributes:
        query_length: T.
        key_length: S.
        query_offset: position of the first query on the key axis.
        causal: masked or unmasked REMs.
        key_mask: [B or 1, S], False for padding keys; None: no padding.
        segments: number of the segment of each position of packed rows, [B, S], as `segment_index` counts them; a
            query sees keys of its own segment alone. None: a row is one segment.
        sliding_window: number of positions that a query sees back, itself included, and ahead if not causal; None: no
            window.
        visible: [B or 1, H or 1, T, S], for masks that the fields above cannot express; else None.
        query_position: position of a single query, shape (), if only the mask contains it. Then `visible` holds the
            mask's row, and `query_offset` has no meaning.
        unread_mask: a 4-D mask inside a compiled graph or a transform of `torch.func`, whose values are not known.
            The operator that receives it reads it with `read_mask`.

    Raises:
        ValueError: queries are not at positions of keys.
    """

    query_length: int
    key_length: int
    query_offset: int
    causal: bool
    key_mask: Tensor | None = None
    segments: Tensor | None = None
    sliding_window: int | None = None
    visible: Tensor | None = None
    query_position: Tensor | None = None
    unread_mask: Tensor | None = None

    def __post_init__(self) -> None:
        # Not in a graph, whose lengths are symbols: the operator makes the mask anew when it runs.
        if torch.compiler.is_compiling() or 0 <= self.query_offset <= self.key_length - self.query_length:
            return
        raise ValueError(
            f"query_length={self.query_length}, query_offset={self.query_offset}, key_length={self.key_length}: "
            f"queries must be at positions of keys, query_offset from 0 to {self.key_length} − query_length. RSA heads"
            " belong on self-attention, not on cross-attention."
        )

    @property
    def seen_length(self) -> int:
        """Number of keys that some query may see: not the slots of a static cache after the last causal query."""
        return self.query_offset + self.query_length if self.causal else self.key_length


def segment_index(ids: Tensor) -> Tensor:
    """Number of the segment of each position, counted from 0 in each row, [B, S]; a run of equal ids is a segment."""
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)


def lags(mask: AttentionMask, device: torch.device) -> Tensor:
    """τ = position of the query − position of the key: [T, S]."""
    T, S = mask.query_length, mask.key_length
    offset = mask.query_offset if mask.query_position is None else mask.query_position
    return (offset + torch.arange(T, device=device))[:, None] - torch.arange(S, device=device)


def boolean_mask(mask: AttentionMask, tau: Tensor) -> Tensor:
    """Which keys each query sees, True where it does: [B or 1, H or 1, T, S].

    Args:
        mask: anything but an unread mask (see `read_traced`).
        tau: its `lags`, [T, S].
    """
    shown = (tau >= 0 if mask.causal else torch.ones_like(tau, dtype=torch.bool))[None, None]
    if mask.sliding_window is not None:
        shown = shown & (tau.abs() < mask.sliding_window)
    if mask.key_mask is not None:
        shown = shown & mask.key_mask[:, None, None]
    if mask.segments is not None:
        of_queries = mask.segments[:, mask.query_offset : mask.query_offset + mask.query_length]
        shown = shown & (of_queries[:, None, :, None] == mask.segments[:, None, None])
    return shown if mask.visible is None else shown & mask.visible


def as_boolean(mask: Tensor, T: int, S: int) -> Tensor:
    """A 4-D mask tensor, boolean or additive, as a boolean one, its last axis cut to S keys.

    Raises:
        ValueError: the mask's shape does not fit.
    """
    if mask.shape[-1] < S or mask.shape[-2] not in (1, T):
        raise ValueError(
            f"RSA cannot read an attention mask of shape {tuple(mask.shape)} for {T} queries and {S} keys: "
            "[batch, heads, queries, keys] is needed."
        )
    mask = mask.detach()[..., :S]
    return mask if mask.dtype == torch.bool else mask > HIDDEN_AT_OR_BELOW


def evaluate_block_mask(block_mask: Any, query: Tensor, key_length: int) -> Tensor:
    """Which keys each query sees under flex attention: [B or 1, H or 1, T, S], boolean.

    It is evaluated in every call, because tensors that `mask_mod` reads may have changed. As long as nothing has, the
    same tensor is returned, so `read_mask` reads it once for all layers of a forward.

    Args:
        block_mask: flex attention's `BlockMask`. Flex attention shows the keys of full blocks, asks `mask_mod` in
            partial blocks, and skips all others.
        query: [B, H, T, D].
        key_length: S.
    """
    from torch.nn.attention.flex_attention import create_mask  # slow to import

    B, H, T, S = *query.shape[:3], key_length
    visible = create_mask(block_mask.mask_mod, B, H, T, S, query.device)
    # vmap expands along an index that `mask_mod` does not look at. One row or head is enough there.
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


# The last answer of `evaluate_block_mask` for each BlockMask, as long as that lives.
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


def read_mask(mask: Tensor, query_length: int, key_length: int, causal: bool) -> AttentionMask:
    """Read a 4-D mask tensor, once for all layers of a forward.

    Args:
        mask: [B or 1, H or 1, T or 1, S or more], boolean or additive.
        query_length: T.
        key_length: S.
        causal: direction of the layer.

    Raises:
        ValueError: the mask's shape does not fit.
    """
    return remembered(_read_mask, mask, query_length, key_length, causal)


def read_row(mask: Tensor, T: int, S: int, causal: bool) -> AttentionMask:
    """Read the mask of a single causal query without looking at its values, so nothing waits for the device.

    The query sees itself and nothing after itself, so the last slot that any row sees is its position. That also holds
    in a static cache, which has slots after it.
    """
    visible = as_boolean(mask, T, S).clone()
    slots = torch.arange(S, device=mask.device)
    position = torch.where(visible, slots, 0).amax()
    return AttentionMask(T, S, S - 1, causal, visible=visible, query_position=position, unread_mask=visible)


def read_traced(mask: AttentionMask) -> AttentionMask:
    """The same mask with `visible` and `query_position` in place of an unread mask, without looking at its values."""
    if mask.unread_mask is None or mask.query_position is not None:
        return mask
    T, S = mask.query_length, mask.key_length
    visible = as_boolean(mask.unread_mask, T, S)
    position = query_position(visible, T, S) if mask.causal else None
    return AttentionMask(T, S, S - T, mask.causal, visible=visible, query_position=position)


def _read_mask(mask: Tensor, T: int, S: int, causal: bool) -> AttentionMask:
    visible = as_boolean(mask, T, S)
    if mask.is_meta:
        return AttentionMask(T, S, S - T, causal)  # only shapes are computed from it
    if visible.shape[1] > 1 and bool((visible == visible[:, :1]).all()):
        visible = visible[:, :1]
    visible = visible.expand(-1, -1, T, S)
    offset = _offset(visible, T, S, causal)
    if visible.shape[1] == 1:
        tau = lags(AttentionMask(T, S, offset, causal), mask.device)
        key_mask = visible[:, 0].any(dim=1)
        padding = None if bool(key_mask.all()) else key_mask

        def explains(candidate: AttentionMask) -> bool:
            return torch.equal(visible, boolean_mask(candidate, tau).expand_as(visible))

        found = AttentionMask(T, S, offset, causal, padding)
        if explains(found):
            return found
        segments = _segments(visible[:, 0], key_mask, offset)
        is_packed = bool(segments.any())
        window = int(torch.where(visible, tau.abs(), 0).amax()) + 1
        for sliding_window in (None, window):
            found = replace(found, segments=segments if is_packed else None, sliding_window=sliding_window)
            if explains(found):
                if is_packed and sliding_window is None and bool((segments[:, -1] == S - 1).all()):
                    warn_single_token_segments()
                return found
    # Python's registry shows a warning of one text and place once.
    warnings.warn(
        "RSA met a mask that is no combination of direction, padding, packed segments and a sliding window. It "
        "computes P V through the explicit P here: exact, but quadratic in the length.",
        stacklevel=2,
    )
    return AttentionMask(T, S, offset, causal, visible=visible.clone())


def _segments(visible: Tensor, key_mask: Tensor, offset: int) -> Tensor:
    """Segments, [B, S], under the assumption that the mask [B, T, S] is one of packed rows.

    A segment begins at a query that does not see the last real key before it. The caller checks the assumption.
    """
    B, T, S = visible.shape
    positions = torch.arange(S, device=visible.device)
    last_real = torch.where(key_mask, positions, -1).cummax(dim=1).values
    before = F.pad(last_real[:, :-1], (1, 0), value=-1)[:, offset : offset + T]
    sees_it = visible.gather(2, before.clamp(min=0)[..., None])[..., 0]
    begins = torch.zeros(B, S, dtype=torch.bool, device=visible.device)
    # Padding between the tokens of a segment begins none; padding whose query sees nothing is a segment of its own.
    real = key_mask[:, offset : offset + T] | ~visible.any(dim=2)
    begins[:, offset : offset + T] = (before >= 0) & ~sees_it & real
    return begins.cumsum(dim=1)


def _offset(visible: Tensor, T: int, S: int, causal: bool) -> int:
    if not causal or T >= S or visible.numel() == 0:
        return S - T
    return int(query_position(visible, T, S))


def query_position(visible: Tensor, T: int, S: int) -> Tensor:
    """Position of the first causal query on the key axis, from a mask, without waiting for its values: ().

    A query sees itself. So the T queries are where each sees the key of its own slot, or where no query sees that key
    because it is padding. Several places may fit; the last one is right, because queries also see the keys before
    them. The farthest visible key does not determine the position: in an image or a prefix, which see ahead, it is
    another token's, and a query that is padding sees less far than its own slot.

    If the first query sees as far as any other, as in one prefix, the mask is the same whatever part of its end is
    padding. Then the last query that sees anything is taken for a token, at the last visible key.

    Args:
        visible: [B or 1, H or 1, T or 1, S], boolean.
        T: number of queries.
        S: number of keys; a static cache has slots after the queries.
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
    return torch.where(is_determined, fitting, (last - last_query).clamp(0, S - T))


class _Memory(threading.local):
    """The last answers of `remembered`: the layers of a forward ask the same of one mask, or of a few in turn."""

    SIZE = 8

    def __init__(self) -> None:
        self.known: list[tuple[weakref.ref[Tensor], Tensor | None, tuple[Any, ...], Any]] = []


_memory = _Memory()


def remembered(function: Callable[..., Answer], tensor: Tensor, *args: Any) -> Answer:
    """`function(tensor, *args)`, computed once for all layers of a forward.

    On a CPU an answer holds while the tensor has the same values. On a GPU, where comparing them would wait, it holds
    until an operation of PyTorch writes to the tensor; writes through `.data` or by other libraries are not noticed.

    Args:
        function: function whose result does not hold the tensor, nor its memory, which may change before a backward.
        tensor: a mask, or positions.
        args: further arguments, comparable by ==.
    """
    if is_recorded():
        return function(tensor, *args)
    is_compared = tensor.device.type == "cpu" or tensor.is_inference()  # inference tensors have no version
    key = (None if is_compared else tensor._version, function, *args)
    known = _memory.known
    for reference, copy, before, answer in known:
        if reference() is tensor and before == key and (copy is None or _is_equal(copy, tensor)):
            found: Answer = answer
            return found
    new = function(tensor, *args)

    def forget(dead: weakref.ref[Tensor]) -> None:
        known[:] = [entry for entry in known if entry[0] is not dead]

    copy = tensor.clone() if is_compared else None
    known[:] = [(weakref.ref(tensor, forget), copy, key, new), *known[: _Memory.SIZE - 1]]
    return new


def _is_equal(copy: Tensor, tensor: Tensor) -> bool:
    if tensor.nbytes > LARGE and tensor.is_contiguous() and tensor.nbytes % 8 == tensor.storage_offset() % 8 == 0:
        # Eight bytes at a time: booleans are compared one by one.
        copy, tensor = (x.contiguous().flatten().view(torch.int64) for x in (copy, tensor))
    return torch.equal(copy, tensor)


def warn_single_token_segments() -> None:
    """Warn that each token is a segment of its own."""
    warnings.warn(
        "No token of this input sees another one, so attention and RSA heads have nothing to work on: each token is "
        "read as a packed segment of its own. If that is not meant, check position_ids: they start anew with each "
        "segment, so all zeros, or one number for all tokens, make every token a segment. (A sliding window of 1 "
        "looks the same.)",
        stacklevel=2,
    )
