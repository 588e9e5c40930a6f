"""Mix the recurrence into what an adapted module's attention gives; and who watches that happen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rsa_hf.heads import heads_of
from rsa_hf.integration.masks import read_attention_mask

__all__ = ["Watcher", "is_watched", "mix_recurrence", "watch"]

Watcher = Callable[[nn.Module, int, int, int, bool], None]


class _Watching(threading.local):
    """Who watches calls of attention; in one thread, since others may run models of their own meanwhile."""

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
    """Mix the recurrence of a module's RSA heads, if it has any, into the output of attention.

    Args:
        module: the attention module.
        attention: [B, T, H, D].
        value: V, with what a cache or a memory holds, [B, Hv, S, D]; the queries are the last T of S positions.
        mask: None, or a 2-D or 4-D mask as `read_attention_mask` takes it.
        causal: direction of the call, where the plan does not say.
        sliding_window: number of positions back that a query sees, itself included, where no mask says so.
        segment_ids: the number of each key's document, [B, S], where no mask says so.

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
    """Call `watcher(module, H, T, S, causal)` for each call of attention in a connected module, in this thread."""
    _watching.watchers.append(watcher)
    try:
        yield
    finally:
        _watching.watchers.remove(watcher)


def is_watched() -> bool:
    """Whether someone watches in this thread."""
    return bool(_watching.watchers)
