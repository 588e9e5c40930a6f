"""Attention: the output of a module with a child named `rsa` is mixed with recurrence.

There are two paths. Most modules get their attention function from transformers' attention interface, which
`wrap_get_interface` wraps. Classes in `architectures/table.py` compute attention themselves: `connect` wraps a method
of theirs. Both lead to `mix_recurrence`, which reads the mask and calls the heads. A trial run records the calls of
both.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from rsa_hf.heads import heads_of
from rsa_hf.integration import what_fits
from rsa_hf.integration.architectures.table import ARCHITECTURES, Architecture
from rsa_hf.ops.mask import (
    AttentionMask,
    PackedSegments,
    as_boolean,
    read_mask,
    read_row,
    remembered,
    warn_single_token_segments,
)
from rsa_hf.rem import is_recorded

__all__ = [
    "AttentionCall",
    "architecture_of",
    "connect",
    "flash_segment_ids",
    "mix_recurrence",
    "read_attention_mask",
    "record_attention_calls",
    "wrap_class",
    "wrap_get_interface",
    "wrap_init_continuous_batching",
]

_BY_CLASS = {(architecture.path, architecture.name): architecture for architecture in ARCHITECTURES}

_NO_CONTINUOUS_BATCHING = (
    "RSA does not work with continuous batching: its paged cache is filled inside the attention function, so the "
    "values of earlier tokens cannot be seen. Use model.generate(...) instead."
)

# Classes whose `is_causal` is False in encoder and decoder alike: the attribute that says whether a layer is causal.
_DIRECTION_ATTRIBUTES = {"InformerAttention": "is_decoder"}


# --- the calls of a trial run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, as `record_attention_calls` sees it.

    Attributes:
        module: the attention module.
        num_heads: H.
        query_length: T.
        key_length: S.
        stated: whether it is causal, according to the call or the module; None: neither says.
        causal: whether it is causal, according to its mask or, on the meta device, as stated.
    """

    module: nn.Module
    num_heads: int
    query_length: int
    key_length: int
    stated: bool | None
    causal: bool | None


class _Recording(threading.local):
    """The calls of a trial run in this thread; None while there is none. Other threads may run models of their own."""

    calls: list[AttentionCall] | None = None


_recording = _Recording()


@contextmanager
def record_attention_calls() -> Iterator[list[AttentionCall]]:
    """Record the calls of attention in this thread while the context is open, with or without RSA heads."""
    calls: list[AttentionCall] = []
    _recording.calls = calls
    try:
        yield calls
    finally:
        _recording.calls = None


# --- modules that use the attention interface -----------------------------------------------------------------------


def wrap_get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mix recurrence into the output of attention modules that have RSA heads."""

    def get_interface(self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]) -> Any:
        base = original(self, attn_implementation, default)

        def attention(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            if heads_of(module) is None and _recording.calls is None:
                return base(module, *args, **keywords)
            return _attention_with_rsa(base, attn_implementation or "", module, *args, **keywords)

        return attention

    return get_interface


def _attention_with_rsa(
    base: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **keywords: Any,
) -> Any:
    """Call an attention function of transformers. Q, K and V are [B, H, T, D] and [B, Hkv, S, D]."""
    if keywords.get("cache") is not None or implementation.startswith("paged|"):
        raise NotImplementedError(_NO_CONTINUOUS_BATCHING)
    if implementation == "flex_attention":
        raise NotImplementedError(
            "RSA does not work with flex attention: its masks (BlockMask) are functions, which cannot be read. Use "
            "attn_implementation='sdpa', 'eager' or 'flash_attention_2'."
        )
    causal = keywords.get("is_causal")
    if causal is None:
        causal = getattr(module, _DIRECTION_ATTRIBUTES.get(type(module).__name__, "is_causal"), None)
    causal = None if causal is None else bool(causal)
    if _recording.calls is not None:
        # Zero queries weight all keys that they see equally, and only the last key has a value here.
        last = torch.zeros_like(value)
        last[:, :, -1] = 1
        seen = base(module, torch.zeros_like(query), key, last, attention_mask, *args, **keywords)[0]
        shown = causal if seen.is_meta else not (seen[:, :-1] != 0).any()
        _recording.calls.append(AttentionCall(module, query.shape[1], query.shape[2], key.shape[2], causal, shown))
    output, weights = base(module, query, key, value, attention_mask, *args, **keywords)
    mixed = mix_recurrence(
        module,
        output,
        value,
        attention_mask,
        causal,
        # The masks of sdpa; an implementation that a user has registered may take them too.
        aligned_top_left=ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"],
        # Under sdpa and eager, windows and documents are in the mask; flash attention takes them as keywords.
        flash=keywords if "flash" in implementation else None,
    )
    return mixed, weights


def wrap_init_continuous_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse continuous batching for a patched model."""

    def init_continuous_batching(self: Any, *args: Any, **keywords: Any) -> Any:
        # An error in the thread that generates would only be logged, and the caller would wait forever.
        if any(heads_of(module) is not None for module in self.modules()):
            raise NotImplementedError(_NO_CONTINUOUS_BATCHING)
        return original(self, *args, **keywords)

    return init_continuous_batching


# --- modules that do not use the attention interface ----------------------------------------------------------------


def architecture_of(module: nn.Module) -> Architecture | None:
    """The row of `architectures/table.py` for an attention module's class; None if it has none."""
    rows = (_BY_CLASS.get((cls.__module__, cls.__name__)) for cls in type(module).__mro__)
    return next((row for row in rows if row is not None), None)


def connect(model: nn.Module) -> None:
    """Wrap the classes of a model's attention modules that have a row in the table, once in a process.

    Raises:
        RuntimeError: a class is not as expected; the message names the transformers versions that fit.
    """
    for module in model.modules():
        row = architecture_of(module)
        if row is None:
            continue
        missing = [name for name in row.attributes if not hasattr(module, name)]
        if missing:
            raise _unexpected(row, f"to have {', '.join(row.attributes)}", missing)
        wrap_class(row.path, row.name)
        if (heads := heads_of(module)) is not None:
            heads.architecture = row
        if row.method == "forward" and "_old_forward" in vars(module):
            # Accelerate's hooks keep the forward from before the class was wrapped.
            module._old_forward = type(module).forward.__get__(module)


def wrap_class(path: str, name: str) -> Architecture:
    """Wrap the method of one class in the table, unless it is wrapped already, and return its row."""
    row, cls = _BY_CLASS[path, name], getattr(importlib.import_module(path), name)
    original = vars(cls).get(row.method)
    if hasattr(original, "_rsa_hf_architecture"):
        return row
    names = list(inspect.signature(original).parameters)[1:] if callable(original) else []
    missing = [name for name in row.parameters if name not in names]
    if not callable(original) or missing:
        raise _unexpected(row, f"to define {row.method}({', '.join(row.parameters)})", missing or [row.method])

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if heads_of(self) is None and _recording.calls is None:
            return original(self, *args, **keywords)

        def mix(attention: Tensor, value: Tensor, mask: Tensor | None, causal: bool, **more: Any) -> Tensor:
            if _recording.calls is not None:
                T, H = attention.shape[1:3]
                _recording.calls.append(AttentionCall(self, H, T, value.shape[2], causal, causal))
            return mix_recurrence(self, attention, value, mask, causal, **more)

        return row.run(self, original, dict(zip(names, args, strict=False)) | keywords, mix)

    method._rsa_hf_architecture = row  # type: ignore[attr-defined]
    setattr(cls, row.method, method)
    return row


def _unexpected(row: Architecture, expected: str, missing: list[str]) -> RuntimeError:
    return RuntimeError(
        f"{what_fits()} {row.path}.{row.name} was expected {expected}, but {', '.join(missing)} is missing. Install a "
        "transformers version that rsa_hf was tested with, or a newer rsa_hf."
    )


# --- eq. 4 ----------------------------------------------------------------------------------------------------------


def mix_recurrence(
    module: nn.Module,
    attention: Tensor,
    value: Tensor,
    mask: Any,
    causal: bool | None,
    *,
    aligned_top_left: bool = False,
    sliding_window: int | None = None,
    flash: Mapping[str, Any] | None = None,
) -> Tensor:
    """Mix P V into the output of attention, if the module has RSA heads.

    Args:
        module: the attention module.
        attention: output of softmax attention, [B, T, H, D].
        value: V, including cached positions or memories, [B, Hv, S, D].
        mask: the call's mask, as in `read_attention_mask`.
        causal: direction of the call, used if the plan does not say; None: unknown.
        aligned_top_left: as in `read_attention_mask`.
        sliding_window: number of positions back that a query sees, itself included, if no mask says so.
        flash: the keywords of a call of flash attention, which has windows and packed documents there.

    Returns:
        [B, T, H, D].

    Raises:
        ValueError: neither the plan nor the call says whether attention is causal.
    """
    rsa = heads_of(module)
    if rsa is None:
        return attention
    if rsa.plan.causal is not None:
        causal = rsa.plan.causal
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} does not say whether it is causal. Patch with RSAConfig(causal=True) or "
            "RSAConfig(causal=False)."
        )
    segment_ids, query = None, attention.transpose(1, 2)
    if flash is not None:
        sliding_window = flash.get("sliding_window")
        segment_ids = flash_segment_ids(query, value, flash) if mask is None else None
    visible = read_attention_mask(
        query,
        value,
        mask,
        causal=causal,
        aligned_top_left=aligned_top_left,
        sliding_window=sliding_window,
        segment_ids=segment_ids,
    )
    mixed: Tensor = rsa(attention, value, visible)
    return mixed


# --- masks: None, 2-D, 4-D, and the keywords of flash attention -----------------------------------------------------


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
        attention_mask: None; 2-D [B, S], nonzero or True for real keys (flash attention), or [B, M] with T ≤ M < S if
            a static cache has slots after the queries; or 4-D [B or 1, H or 1, T or 1, S], boolean (sdpa) or additive
            (eager).
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
            if is_recorded() or attention_mask.is_inference():
                return read_row(attention_mask, T, S, causal)
            return remembered(read_row, attention_mask, T, S, causal)
        if is_recorded():
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


def flash_segment_ids(query: Tensor, key: Tensor, keywords: Mapping[str, Any]) -> Tensor | None:
    """Segment ids of packed documents, [1, S], from flash attention's keywords; None if there is one document.

    Args:
        query: [1, H, T, D].
        key: [1, Hkv, S, D].
        keywords: keywords of the attention call: `cu_seq_lens_q`, the start of each document and the end of the last;
            or `position_ids`, [1, T], which restart with each document (at their minimum: RoBERTa's is not 0).

    Raises:
        NotImplementedError: packed documents in several rows, or after cached keys.
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
