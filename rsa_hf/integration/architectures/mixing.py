"""Mix P V into the attention output of a wrapped module, and let the probe watch such calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rsa_hf.heads import heads_of
from rsa_hf.integration.masks import read_attention_mask

__all__ = ["Run", "Watcher", "is_watched", "mix_recurrence", "watch"]

Run = Callable[[Any, Callable[..., Any], dict[str, Any], Callable[..., Tensor]], Any]
Watcher = Callable[[nn.Module, int, int, int, bool], None]


class _Watching(threading.local):
    """The watchers of this thread; other threads may run models of their own."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []


_watching = _Watching()


def mix_recurrence(
    module: nn.Module,
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    sliding_window: int | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Mix P V into the output of attention, if the module has RSA heads.

    Args:
        module: the attention module.
        attention: [B, T, H, D].
        value: V, including cached positions or memories, [B, Hv, S, D]; the queries are the last T of S positions.
        mask: None, or a 2-D or 4-D mask as in `read_attention_mask`.
        causal: direction of the call, used if the plan does not say.
        sliding_window: number of positions back that a query sees, itself included, if no mask says so.
        segment_ids: id of each key's packed segment, [B, S], if no mask says so.

    Returns:
        [B, T, H, D].
    """
    for watcher in _watching.watchers:
        watcher(module, attention.shape[2], attention.shape[1], value.shape[2], causal)
    rsa = heads_of(module)
    if rsa is None:
        return attention
    attention_mask = read_attention_mask(
        attention.transpose(1, 2),
        value,
        mask,
        causal=causal if rsa.plan.causal is None else rsa.plan.causal,
        aligned_top_left=False,
        sliding_window=sliding_window,
        segment_ids=segment_ids,
    )
    mixed: Tensor = rsa(attention, value, attention_mask)
    return mixed


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Call `watcher(module, H, T, S, causal)` for each attention call of a wrapped module in this thread."""
    _watching.watchers.append(watcher)
    try:
        yield
    finally:
        _watching.watchers.remove(watcher)


def is_watched() -> bool:
    """Whether there is a watcher in this thread."""
    return bool(_watching.watchers)
