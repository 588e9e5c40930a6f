"""Who sees whom: direction, query offset, padding, packing, window.

An attention call is read once into a `AttentionMask`, which is what the product P V needs to know of it. A query never
takes part in a recurrence over keys that attention hides from it.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "HIDDEN_AT_OR_BELOW",
    "AttentionMask",
    "PackedSegments",
    "query_position",
    "read_mask",
    "read_row",
    "remembered",
    "visible_keys",
    "warn_of_single_tokens",
]

Answer = TypeVar("Answer")
# Additive masks hide a key with −inf, the dtype's minimum, or −10,000 in older models; anything above is a bias.
HIDDEN_AT_OR_BELOW = -1e4


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys each query sees.

    Attributes:
        query_length: T.
        key_length: S.
        query_offset: position of the first query on the key axis.
        causal: masked or unmasked REMs.
        key_mask: [B or 1, S], False for padding keys; None: no padding.
        segments: segments of packed rows; a query sees keys of its own segment alone. None: a row is one segment.
        sliding_window: number of positions that a query sees back, itself included, and ahead if not causal; or None.
        visible: [B or 1, H or 1, T, S], for masks that the fields above cannot express; else None.
        query_position: position of a single query, shape (), if only the mask tells it. Then `visible` holds the
            mask's row, and `query_offset` has no meaning.
        unread_mask: a 4-D mask inside a compiled graph, whose values are not known yet. The operator that receives
            it reads it with `read_mask`.
    """

    query_length: int
    key_length: int
    query_offset: int
    causal: bool
    key_mask: Tensor | None = None
    segments: PackedSegments | None = None
    sliding_window: int | None = None
    visible: Tensor | None = None
    query_position: Tensor | None = None
    unread_mask: Tensor | None = None


class PackedSegments:
    """The documents of packed rows.

    Args:
        ids: shape [B, S]; a document is a run of equal numbers.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        # What the product has worked out for these documents and their key mask, kept for the next layer.
        self.layouts: dict[int, Any] = {}

    @functools.cached_property
    def index(self) -> Tensor:
        """Which document of its row each position belongs to: [B, S]."""
        return F.pad(self.ids[:, 1:] != self.ids[:, :-1], (1, 0)).cumsum(1)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """Lengths of the documents, 0 behind the last one of a row: [B, documents]."""
        count = int(self.index[:, -1].max()) + 1
        lengths = torch.zeros(len(self.index), count, dtype=torch.long, device=self.index.device)
        return lengths.scatter_add_(1, self.index, torch.ones_like(self.index))

    @functools.cached_property
    def positions(self) -> Tensor:
        """The place of each position within its document: [B, S]."""
        starts = self.lengths.cumsum(1) - self.lengths
        positions = torch.arange(self.index.shape[1], device=self.index.device)
        return positions - starts.gather(1, self.index)

    @functools.cached_property
    def mean_length(self) -> int:
        """Of all documents, rounded."""
        return round(self.index.numel() / int((self.lengths > 0).sum()))


def read_mask(mask: Tensor, batch: int, query_length: int, key_length: int, causal: bool) -> AttentionMask:
    """What a 4-D mask says, remembered for the other layers of the same forward.

    Args:
        mask: shape [B or 1, H or 1, T or 1, S or more], boolean or additive.
        batch: B.
        query_length: T.
        key_length: S.
        causal: direction of the layer.

    Raises:
        ValueError: the mask's shape does not fit.
    """
    return remembered(_read_mask, mask, batch, query_length, key_length, causal)


class _Memory(threading.local):
    """Remembers the last answers: all layers of a forward ask the same of one mask, or alternate between a few."""

    SIZE = 8

    def __init__(self) -> None:
        self.known: list[tuple[weakref.ref[Tensor], Tensor | None, tuple[Any, ...], Any]] = []


_memory = _Memory()


def remembered(question: Callable[..., Answer], tensor: Tensor, *args: Any) -> Answer:
    """`question(tensor, *args)`, asked once for all layers of a forward.

    Args:
        question: a function; its answer must not hold the tensor itself, or that would live for ever.
        tensor: a mask, or positions.
        args: what else it takes; can be compared.
    """
    if torch.compiler.is_compiling():
        return question(tensor, *args)
    # A tensor made under inference_mode has no version that would tell whether it was written to since, so a copy is
    # kept to compare it with.
    asked = (None if tensor.is_inference() else tensor._version, question, *args)
    known = _memory.known
    for reference, copy, before, answer in known:
        if reference() is tensor and before == asked and (copy is None or torch.equal(copy, tensor)):
            found: Answer = answer
            return found
    new = question(tensor, *args)

    def forget(dead: weakref.ref[Tensor]) -> None:
        known[:] = [entry for entry in known if entry[0] is not dead]

    copy = tensor.clone() if tensor.is_inference() else None
    known[:] = [(weakref.ref(tensor, forget), copy, asked, new), *known[: _Memory.SIZE - 1]]
    return new


def visible_keys(mask: Tensor, T: int, S: int) -> Tensor:
    """A 4-D mask as a boolean one, its last axis cut to the keys there are."""
    if mask.shape[-1] < S or mask.shape[-2] not in (1, T):
        raise ValueError(
            f"RSA cannot read an attention mask of shape {tuple(mask.shape)} for {T} queries and {S} keys: "
            "[batch, heads, queries, keys] is needed."
        )
    mask = mask.detach()[..., :S]
    return mask if mask.dtype == torch.bool else mask > HIDDEN_AT_OR_BELOW


def read_row(mask: Tensor, T: int, S: int, causal: bool) -> AttentionMask:
    """The mask of a single causal query, with no look at its values: nothing waits for the device here.

    The query sees itself and nothing behind itself, so the last slot that any row sees is its position: also in a
    static cache, whose keys go on behind it.
    """
    visible = visible_keys(mask, T, S)
    slots = torch.arange(S, device=mask.device)
    position = torch.where(visible, slots, 0).amax()
    # (Detached, since what is remembered of a mask must not keep it alive.)
    return AttentionMask(T, S, S - 1, causal, visible=visible, query_position=position, unread_mask=mask.detach())


def _read_mask(mask: Tensor, B: int, T: int, S: int, causal: bool) -> AttentionMask:
    visible = visible_keys(mask, T, S)
    if mask.is_meta:
        # It holds nothing, and nothing is computed from it but shapes.
        return AttentionMask(T, S, S - T, causal)
    if visible.shape[1] > 1 and bool((visible == visible[:, :1]).all()):
        visible = visible[:, :1]
    offset = _offset(visible, T, S, causal)
    key_mask = visible[:, 0].any(dim=1)
    expected = key_mask[:, None, None, :]
    if causal:
        expected = expected & (_lags(T, S, offset, mask.device) >= 0)
    shown = None if bool(key_mask.all()) else key_mask
    if visible.shape[1] == 1:
        visible = visible.expand(-1, -1, T, S)
        if torch.equal(visible, expected.expand_as(visible)):
            return AttentionMask(T, S, offset, causal, shown)
        segments = PackedSegments(_segment_ids(visible[:, 0], key_mask, offset))
        index = segments.index
        rows = index[:, offset : offset + T]
        same = expected & (rows[:, None, :, None] == index[:, None, None, :])
        # The product lays documents out row by row, also where one mask serves all rows.
        packed = PackedSegments(index.expand(B, -1)) if bool((index != index[:, :1]).any()) else None
        if torch.equal(visible, same):
            if packed is not None and not bool(segments.positions.any()):
                warn_of_single_tokens()
            return AttentionMask(T, S, offset, causal, shown, packed)
        distance = _lags(T, S, offset, mask.device).abs()
        window = int(torch.where(visible, distance, 0).amax()) + 1
        if torch.equal(visible, same & (distance < window)):
            return AttentionMask(T, S, offset, causal, shown, packed, window)
    _warn_dense("a mask that is no combination of direction, padding, packed documents and a sliding window")
    return AttentionMask(T, S, offset, causal, visible=visible.expand(-1, -1, T, S))


def _segment_ids(visible: Tensor, key_mask: Tensor, offset: int) -> Tensor:
    """The documents there are if the mask [B, T, S] is one of packed rows: [B, S].

    A document begins at a query that does not see the real key before it. Whether that explains the mask is for the
    caller to check.
    """
    B, T, S = visible.shape
    positions = torch.arange(S, device=visible.device)
    last_real = torch.where(key_mask, positions, -1).cummax(dim=1).values
    before = F.pad(last_real[:, :-1], (1, 0), value=-1)[:, offset : offset + T]
    sees_it = visible.gather(2, before.clamp(min=0)[..., None])[..., 0]
    begins = torch.zeros(B, S, dtype=torch.bool, device=visible.device)
    # Padding between the tokens of a document begins none; padding whose query sees nothing stands for itself.
    real = key_mask[:, offset : offset + T] | ~visible.any(dim=2)
    begins[:, offset : offset + T] = (before >= 0) & ~sees_it & real
    return begins.cumsum(dim=1)


def _offset(visible: Tensor, T: int, S: int, causal: bool) -> int:
    """Position of the first query on the key axis."""
    if not causal or T == S or visible.numel() == 0:
        return S - T
    return int(query_position(visible, T, S))


def query_position(visible: Tensor, T: int, S: int) -> Tensor:
    """Position of the first of causal queries on the key axis, read off a mask without waiting for its values: ().

    A query sees itself. So T queries in a row stand where each sees the key of its own slot, or nobody does, since it
    is padding; of such places at the last one, as earlier ones lie behind the queries, which see them too. The
    farthest key that a query sees does not tell: where an image or a prefix sees ahead it is another token's, and
    where the query is padding it is one further back.

    Where the first query sees as far as any, as in one prefix, the mask is the same whatever of its tail is padding.
    Then the last query that sees anything is taken for a token, at the last key that is seen.

    Args:
        visible: shape [B or 1, H or 1, T or 1, S], boolean.
        T: number of queries.
        S: number of keys; those of a static cache go on behind the queries.
    """
    visible = visible.expand(-1, -1, T, S).flatten(0, 1)
    slots = torch.arange(S, device=visible.device)
    seen = visible.any(dim=1)
    last = torch.where(seen, slots, 0).max()
    # [T, S]: which queries cannot stand at which slots, in one row or another.
    misfits = (seen[:, None] & ~visible).any(dim=0)
    # Column i of this skewed matrix is the diagonal on which the first query stands at slot i.
    diagonals = F.pad(misfits.flatten(), (0, T)).view(T, S + 1)[:, : S - T + 1]
    places = slots[: S - T + 1]
    counts = torch.where(places <= last, diagonals.sum(dim=0), T + 1)
    told = torch.where(counts == counts.min(), places, 0).max()
    asking = torch.where(visible.any(dim=2).any(dim=0), torch.arange(T, device=visible.device), 0).max()
    is_told = (misfits[0] & (slots == last)).any()
    return torch.where(is_told, told, (last - asking).clamp(0, S - T))


def _lags(T: int, S: int, offset: int, device: torch.device) -> Tensor:
    return (offset + torch.arange(T, device=device))[:, None] - torch.arange(S, device=device)[None, :]


def warn_of_single_tokens() -> None:
    """Warn that each token is a document of its own."""
    warnings.warn(
        "no token of this input sees another one, so attention and RSA heads have nothing to work on: each counts as "
        "a packed document of its own. If that is not meant, look at position_ids, which begin anew with each "
        "document: all 0, or the same number for all, they say that every token is one. (A sliding window of 1 "
        "looks the same.)",
        stacklevel=2,
    )


def _warn_dense(what: str) -> None:
    # Python's own registry shows a warning of one text and place once.
    warnings.warn(
        f"RSA met {what} and computes P V through the explicit P here: exact, but quadratic in the length.",
        stacklevel=2,
    )
