"""Attention: the output of a module with a child named `rsa` is mixed with recurrence; calls can be recorded.

Continuous batching, whose thread could only log an error, is refused for a patched model before it starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from rsa_hf.heads import RSAHeads, heads_of
from rsa_hf.integration.architectures import watch
from rsa_hf.integration.masks import flash_segment_ids, is_causal, read_attention_mask

__all__ = ["AttentionCall", "record_attention_calls", "wrap_get_interface", "wrap_init_continuous_batching"]

NO_CONTINUOUS_BATCHING = (
    "RSA does not work with continuous batching: its paged cache is filled inside the attention function, so the "
    "values of earlier tokens cannot be seen. Use model.generate(...) instead."
)


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function, as `record_attention_calls` sees it.

    Attributes:
        module: the attention module.
        num_heads: H.
        query_length: T.
        key_length: S.
        causal: direction that the call or the module gives; None: neither does.
        sees_later: whether any query but the last saw the last key; None on the meta device, which has no values.
    """

    module: nn.Module
    num_heads: int
    query_length: int
    key_length: int
    causal: bool | None
    sees_later: bool | None

    @property
    def direction(self) -> bool | None:
        """Whether the call is causal, as its mask shows or, without values, as the module says."""
        return self.causal if self.sees_later is None else not self.sees_later


_recording = threading.Lock()


@contextmanager
def record_attention_calls() -> Iterator[list[AttentionCall]]:
    """Record the calls of attention in this thread while the context is open."""
    here = threading.get_ident()
    calls: list[AttentionCall] = []

    def record(module: nn.Module, num_heads: int, query_length: int, key_length: int, causal: bool) -> None:
        calls.append(AttentionCall(module, num_heads, query_length, key_length, causal, sees_later=not causal))

    with _recording, watch(record):
        original = AttentionInterface.get_interface

        def recording(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            base = original(self, name, default)
            if threading.get_ident() != here:
                return base  # of another model, which must not notice

            def attention(
                module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any
            ) -> Any:
                _require_supported(name, keywords)
                # Zero queries weight all keys that they see equally, and only the last key has a value here.
                last = torch.zeros_like(value)
                last[:, :, -1] = 1
                seen = base(module, torch.zeros_like(query), key, last, *args, **keywords)[0]
                sees_later = None if seen.is_meta else bool((seen[:, :-1] != 0).any())
                causal = is_causal(module, keywords)
                calls.append(AttentionCall(module, query.shape[1], query.shape[2], key.shape[2], causal, sees_later))
                return base(module, query, key, value, *args, **keywords)

            return attention

        setattr(AttentionInterface, "get_interface", recording)  # noqa: B010  (mypy refuses the plain assignment)
        try:
            yield calls
        finally:
            setattr(AttentionInterface, "get_interface", original)  # noqa: B010


def wrap_get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mix recurrence into the output of attention modules that have RSA heads."""

    def get_interface(self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]) -> Any:
        base = original(self, attn_implementation, default)

        def attention(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            rsa = heads_of(module)
            if rsa is None:
                return base(module, *args, **keywords)
            return _attention_with_rsa(rsa, base, attn_implementation, module, *args, **keywords)

        return attention

    return get_interface


def _attention_with_rsa(
    rsa: RSAHeads,
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
    _require_supported(implementation, keywords)
    output, weights = base(module, query, key, value, attention_mask, *args, **keywords)
    flash = "flash" in (implementation or "")
    causal = rsa.plan.causal if rsa.plan.causal is not None else is_causal(module, keywords)
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} does not say whether it is causal. Patch with RSAConfig(causal=True) or "
            "RSAConfig(causal=False)."
        )
    visible = read_attention_mask(
        query,
        key,
        attention_mask,
        causal=causal,
        aligned_top_left=_has_masks_of_sdpa(implementation),
        # Under sdpa and eager, windows and documents are in the mask; flash attention takes them as keywords.
        sliding_window=keywords.get("sliding_window") if flash else None,
        segment_ids=flash_segment_ids(query, key, keywords) if flash and attention_mask is None else None,
    )
    return rsa(output, value, visible), weights


def _has_masks_of_sdpa(implementation: str) -> bool:
    """Whether an implementation gets the masks of sdpa; one that a user has registered may."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def _require_supported(implementation: str | None, keywords: dict[str, Any]) -> None:
    if keywords.get("cache") is not None or (implementation or "").startswith("paged|"):
        raise NotImplementedError(NO_CONTINUOUS_BATCHING)
    if implementation == "flex_attention":
        raise NotImplementedError(
            "RSA does not work with flex attention: its masks (BlockMask) are functions, which cannot be read. Use "
            "attn_implementation='sdpa', 'eager' or 'flash_attention_2'."
        )


def wrap_init_continuous_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse continuous batching for a patched model."""

    def init_continuous_batching(self: Any, *args: Any, **keywords: Any) -> Any:
        # In the thread that generates an error would only be logged, and the caller would get no tokens.
        if any(isinstance(module, RSAHeads) for module in self.modules()):
            raise NotImplementedError(NO_CONTINUOUS_BATCHING)
        return original(self, *args, **keywords)

    return init_continuous_batching
