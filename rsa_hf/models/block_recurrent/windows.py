"""Where the windows of a text begin and end, and who sees whom within them.

A text is cut into windows of W tokens, counted from its beginning, and a token sees no further back than the window
before its own. A segment may begin and end anywhere: the memory's C positions tell where. They are those of the window
that is not full yet, C mod W, behind a full one where there is one; so C < 2W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rsa_hf.models.transformer_xl.attention import visibility

__all__ = ["Window", "cut", "distance_buckets", "remembered_length"]


@dataclass(frozen=True, eq=False)
class Window:
    """The part of a segment that lies within one window: t tokens, which with what precedes them may see S keys.

    Attributes:
        tokens: its place in the segment.
        keys: the place of its keys in memory and segment, from the start of the window before.
        visible: which keys each token sees, [B or 1, 1, t, S].
        buckets: the class of each distance, [t, S].
        real: False for keys that are padding, [B, S]; None: there is no padding.
        full: whether the window ends with these tokens.
    """

    tokens: slice
    keys: slice
    visible: Tensor
    buckets: Tensor
    real: Tensor | None
    full: bool


def remembered_length(length: int, window_size: int) -> int:
    """How many of the last positions the memory keeps, of this many that there are."""
    return length if length < window_size else window_size + length % window_size


def distance_buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The class of each distance, as in T5 (Raffel et al., 2020, section 2.1).

    Half of the classes are for the first distances, one each; half for ranges that grow geometrically up to
    `max_distance`, from where on all is one class. What is behind the query is of class 0, and never seen.
    """
    exact = num_buckets // 2
    # In double precision: a distance where a class begins must not fall into the one before.
    beyond = torch.log(distances.clamp(min=exact).double() / exact) / math.log(max_distance / exact)
    ranges = exact + (beyond * (num_buckets - exact) + 1e-9).long()
    return torch.where(distances < exact, distances.clamp(min=0), ranges.clamp(max=num_buckets - 1))


def cut(
    T: int,
    C: int,
    window_size: int,
    attention_mask: Tensor | None,
    num_buckets: int,
    max_distance: int,
    device: torch.device,
) -> list[Window]:
    """Cut a segment at the borders of windows.

    Args:
        T: number of tokens of the segment.
        C: positions of memory before it.
        window_size: W.
        attention_mask: shape [B, L], 0 for padding; its last column is the last token of the segment, and what is
            before its first is real.
        num_buckets: of `distance_buckets`.
        max_distance: likewise.
        device: where to build masks.
    """
    # Windows of equal shape share their tensors, so that a mask is built and read once.
    shared: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    windows = []
    begin = C
    while begin < C + T:
        start = begin - begin % window_size
        end = min(start + window_size, C + T)
        keys = slice(max(0, start - window_size), end)
        t, S = end - begin, keys.stop - keys.start
        if (t, S) not in shared:
            distances = S - t + torch.arange(t, device=device)[:, None] - torch.arange(S, device=device)
            buckets = distance_buckets(distances, num_buckets, max_distance)
            shared[t, S] = visibility(t, S - t, window_size, None, device), buckets
        visible, buckets = shared[t, S]
        real = None
        if attention_mask is not None:
            seen = attention_mask[:, : attention_mask.shape[1] - (C + T - end)]
            # The last query of a window without limits sees all that is real.
            real = visibility(1, S - 1, None, seen, device)[:, 0, 0]
            visible = visible & real[:, None, None]
        tokens = slice(begin - C, end - C)
        windows.append(Window(tokens, keys, visible, buckets, real, end == start + window_size))
        begin = end
    return windows
