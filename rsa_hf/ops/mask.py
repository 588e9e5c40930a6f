"""Which keys each query sees: `AttentionMask`, its boolean form, and a cache of what is read from mask tensors.

Notation: batch B, heads H, queries T, keys S; queries are positions `query_offset … query_offset + T − 1` of the key
axis. A query gets nothing from keys that attention hides from it: P is masked as attention is.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.rem import is_recorded, is_transformed

Answer = TypeVar("Answer")
FEW_QUERIES = 16
LARGE = 2**13  # bytes of a mask above which comparing eight bytes at a time is faster than one by one


@dataclass(eq=False)  # not frozen: one is made in each layer, and freezing takes as long as a small operation
class AttentionMask:
    """Which keys each query sees. Raises a ValueError if queries are not at positions of keys."""

    query_length: int  # T
    key_length: int  # S
    query_offset: int  # position of the first query on the key axis
    causal: bool  # masked or unmasked REMs
    key_mask: Tensor | None = None  # [B or 1, S], False for padding keys
    # Number of each position's document in packed rows, [B, S], as `document_index` counts them. A query sees only its
    # own document.
    documents: Tensor | None = None
    sliding_window: int | None = None  # positions that a query sees back, itself included; as many ahead if not causal
    visible: Tensor | None = None  # [B or 1, H or 1, T, S], for masks that the fields above cannot express
    # Position of a single query, shape (), if only the mask contains it. Then `visible` holds the mask's row, and
    # `query_offset` has no meaning.
    query_position: Tensor | None = None
    # A 4-D mask inside a graph or a transform of `torch.func`, whose values are not known. The operator that receives
    # it reads it with `read_mask`.
    unread_mask: Tensor | None = None

    def __post_init__(self) -> None:
        # Not checked in a graph, where lengths are symbols: the operator makes the mask again when it runs.
        if torch.compiler.is_compiling() or 0 <= self.query_offset <= self.key_length - self.query_length:
            return
        raise ValueError(
            f"query_length={self.query_length}, query_offset={self.query_offset}, key_length={self.key_length}: "
            f"queries must be at positions of keys, query_offset from 0 to {self.key_length} − query_length. RSA heads"
            " belong on self-attention, not on cross-attention."
        )

    @property
    def has_few_queries(self) -> bool:
        """Whether so few queries follow cached keys that T·S weights cost less than a walk over all S keys."""
        return self.query_length <= FEW_QUERIES and self.query_length < self.key_length

    @property
    def is_step(self) -> bool:
        """Whether this is the mask of a single causal query after cached keys."""
        return self.query_length == 1 < self.key_length and self.causal

    @property
    def seen_length(self) -> int:
        """Number of keys that some query may see: without the slots of a static cache after the last causal query."""
        return self.query_offset + self.query_length if self.causal else self.key_length


def document_index(ids: Tensor) -> Tensor:
    """Number of each position's document, counted from 0 in each row, [B, S]; a run of equal ids is a document."""
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)


def lags(mask: AttentionMask, device: torch.device) -> Tensor:
    """τ = position of the query − position of the key: [T, S]."""
    T, S = mask.query_length, mask.key_length
    offset = mask.query_offset if mask.query_position is None else mask.query_position
    return (offset + torch.arange(T, device=device))[:, None] - torch.arange(S, device=device)


def boolean_mask(mask: AttentionMask, tau: Tensor) -> Tensor:
    """Which keys each query sees, [B or 1, H or 1, T, S]; tau are the mask's `lags`. Not for an unread mask."""
    shown = (tau >= 0 if mask.causal else torch.ones_like(tau, dtype=torch.bool))[None, None]
    if mask.sliding_window is not None:
        shown = shown & (tau.abs() < mask.sliding_window)
    if mask.key_mask is not None:
        shown = shown & mask.key_mask[:, None, None]
    if mask.documents is not None:
        of_queries = mask.documents[:, mask.query_offset : mask.query_offset + mask.query_length]
        shown = shown & (of_queries[:, None, :, None] == mask.documents[:, None, None])
    return shown if mask.visible is None else shown & mask.visible


class _Memory(threading.local):
    """The last answers of `remembered`: all layers of a forward ask the same about one mask, or a few in turn."""

    SIZE = 8

    def __init__(self) -> None:
        self.known: list[tuple[weakref.ref[Tensor], Tensor | None, tuple[Any, ...], Any]] = []


_memory = _Memory()


def remembered(function: Callable[..., Answer], tensor: Tensor, *args: Any) -> Answer:
    """`function(tensor, *args)`, computed once for all layers of a forward.

    On a CPU an answer holds while the tensor has the same values. On a GPU, where comparing them would wait, it holds
    until an operation of PyTorch writes to the tensor; writes through `.data` or by other libraries are not noticed.
    The result must not hold the tensor or share its memory, which may change before a backward pass.
    """
    if is_recorded() or is_transformed():
        return function(tensor, *args)
    is_compared = tensor.device.type == "cpu" or tensor.is_inference()  # inference tensors have no version
    key = (None if is_compared else tensor._version, function, *args)
    known = _memory.known
    for reference, copy, before, answer in known:
        if reference() is tensor and before == key and (copy is None or _is_equal(copy, tensor)):
            found: Answer = answer
            return found
    with torch.inference_mode(False):  # the next caller may need the answer for a backward pass
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
