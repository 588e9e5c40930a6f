"""Who sees whom: direction, query offset, padding, packing, window.

The one file that knows transformers' mask conventions. An attention call is read once into a `Geometry`, which is
what the product P V needs to know of it. A query never takes part in a recurrence over keys that attention hides
from it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Geometry", "is_causal", "read_geometry"]

# Additive masks hide a key with −inf, the dtype's minimum, or −10,000 in older models; anything above is a bias.
HIDDEN_AT_OR_BELOW = -1e4


@dataclass(frozen=True, eq=False)
class Geometry:
    """Which keys each query sees, in the terms of `rem_product`.

    Attributes:
        query_length: T.
        key_length: S.
        query_offset: position of the first query on the key axis.
        causal: masked or unmasked REMs.
        key_mask: shape [B or 1, S], False for keys that nobody sees; None: all are seen.
        visible: shape [B or 1, H or 1, T, S], for visibility that the fields above cannot express; else None.
    """

    query_length: int
    key_length: int
    query_offset: int
    causal: bool
    key_mask: Tensor | None = None
    visible: Tensor | None = None


def is_causal(module: nn.Module, keywords: dict[str, Any]) -> bool | None:
    """Direction of an attention call: its `is_causal` keyword, else the module's attribute, else None (unknown)."""
    value = keywords.get("is_causal")
    if value is None:
        value = getattr(module, "is_causal", None)
    return None if value is None else bool(value)


def read_geometry(
    query: Tensor,
    key: Tensor,
    attention_mask: Any,
    *,
    causal: bool,
    aligned_top_left: bool,
    sliding_window: int | None = None,
) -> Geometry:
    """Read one attention call.

    Args:
        query: shape [B, H, T, D].
        key: shape [B, Hkv, S, D].
        attention_mask: None; 2-D [B, S], nonzero or True for real keys (flash attention); or 4-D
            [B or 1, H or 1, T or 1, S], boolean (sdpa) or additive (eager).
        causal: direction of the layer.
        aligned_top_left: what a missing mask means where T < S: queries at positions 0 … T−1 (sdpa), or the last
            T positions (eager, flash attention). A single query sees every key under both.
        sliding_window: number of positions back that a query sees, itself included, where no mask says so.

    Returns:
        The geometry of the call.

    Raises:
        TypeError: a mask of a kind that is not known, e.g. flex attention's BlockMask.
        ValueError: a mask whose shape does not fit.
    """
    T, S = query.shape[2], key.shape[2]
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"RSA cannot read an attention mask of type {type(attention_mask).__name__}. Allowed: None, or a tensor "
            "as sdpa, eager and flash attention take it. Load the model with attn_implementation='sdpa' or 'eager'."
        )
    if attention_mask is not None and attention_mask.dim() == 4:
        if torch.compiler.is_compiling() and T == S:
            # The queries' place is known, and the dense path is exact whatever the mask holds.
            visible = _visible(attention_mask, T, S)
            return Geometry(T, S, 0, causal, None, visible.expand(-1, -1, T, S))
        return _read_outside_the_graph(attention_mask, T, S, causal)
    offset = 0 if aligned_top_left and causal and T > 1 else S - T
    key_mask = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[-1] < S:
            raise ValueError(
                f"RSA cannot read an attention mask of shape {tuple(attention_mask.shape)} for {T} queries and {S} "
                "keys: [batch, keys] or [batch, heads, queries, keys] is needed."
            )
        key_mask = attention_mask[:, -S:].bool()
    if sliding_window is not None and sliding_window < S:
        lags = _lags(T, S, offset, query.device)
        inside = lags < sliding_window if causal else lags.abs() < sliding_window
        _warn_dense("a sliding window")
        return Geometry(T, S, offset, causal, key_mask, inside[None, None])
    return Geometry(T, S, offset, causal, key_mask)


class _MaskReader(threading.local):
    """Reads 4-D masks; remembers the last one, since all layers of a forward share one mask tensor."""

    def __init__(self) -> None:
        self.mask: weakref.ref[Tensor] | None = None
        self.version = -1
        self.asked: tuple[int, int, bool] | None = None
        self.geometry: Geometry | None = None

    def read(self, mask: Tensor, T: int, S: int, causal: bool) -> Geometry:
        # A mask made under inference_mode has no version that would tell whether it was written to since.
        if mask.is_inference():
            return _read_mask(mask, T, S, causal)
        asked = (T, S, causal)
        if (
            self.geometry is not None
            and self.mask is not None
            and self.mask() is mask
            and (self.version, self.asked) == (mask._version, asked)
        ):
            return self.geometry
        geometry = _read_mask(mask, T, S, causal)
        self.mask, self.version, self.asked, self.geometry = weakref.ref(mask), mask._version, asked, geometry
        return geometry


_masks = _MaskReader()

# Where the queries stand in a cache is in the mask's values, which a compiled graph cannot look at: the graph breaks
# here, and under fullgraph=True torch says so, rather than that distances are counted from the wrong place.
_read_outside_the_graph: Callable[[Tensor, int, int, bool], Geometry]
_read_outside_the_graph = torch.compiler.disable(_masks.read)  # type: ignore[no-untyped-call]


def _visible(mask: Tensor, T: int, S: int) -> Tensor:
    """A 4-D mask as a boolean one, its last axis cut to the keys there are."""
    if mask.shape[-1] < S or mask.shape[-2] not in (1, T):
        raise ValueError(
            f"RSA cannot read an attention mask of shape {tuple(mask.shape)} for {T} queries and {S} keys: "
            "[batch, heads, queries, keys] is needed."
        )
    mask = mask.detach()[..., :S]
    return mask if mask.dtype == torch.bool else mask > HIDDEN_AT_OR_BELOW


def _read_mask(mask: Tensor, T: int, S: int, causal: bool) -> Geometry:
    visible = _visible(mask, T, S)
    if visible.shape[1] > 1 and bool((visible == visible[:, :1]).all()):
        visible = visible[:, :1]
    offset = _offset(visible, T, S, causal)
    key_mask = visible[:, 0].any(dim=1)
    expected = key_mask[:, None, None, :]
    if causal:
        expected = expected & (_lags(T, S, offset, mask.device) >= 0)
    if visible.shape[1] == 1 and torch.equal(visible.expand(-1, -1, T, S), expected.expand(-1, -1, T, S)):
        return Geometry(T, S, offset, causal, None if bool(key_mask.all()) else key_mask)
    _warn_dense("a mask that is neither causal nor padding alone (packed documents, a sliding window)")
    return Geometry(T, S, offset, causal, None, visible.expand(-1, -1, T, S))


def _offset(visible: Tensor, T: int, S: int, causal: bool) -> int:
    """Position of the first query on the key axis.

    A causal query sees itself and nothing behind itself, so the last slot it sees is its own position: also in a
    static cache, whose keys go on behind the queries. Queries that are padding see less; any that is not tells.
    """
    if not causal or T == S:
        return S - T
    slots = torch.arange(1, S + 1, device=visible.device)
    own = (visible * slots).amax(dim=-1) - 1 - torch.arange(visible.shape[-2], device=visible.device)
    return min(max(int(own.max()), 0), S - T)


def _lags(T: int, S: int, offset: int, device: torch.device) -> Tensor:
    return (offset + torch.arange(T, device=device))[:, None] - torch.arange(S, device=device)[None, :]


def _warn_dense(what: str) -> None:
    # Python's own registry shows a warning of one text and place once.
    warnings.warn(
        f"RSA met {what} and computes P V through the explicit P here: exact, but quadratic in the length.",
        stacklevel=2,
    )
