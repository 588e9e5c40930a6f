"""Which tokens of a segment go into which slots of which chunks, when every row may stand elsewhere in its chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Placement"]


class Placement:
    """The tokens of a segment in slots, counted from the beginning of the chunk that each row is in.

    The first `filled[b]` slots of row b hold tokens of earlier segments. Padding takes no slot, wherever it stands, so
    a row is cut into the same chunks alone and in a batch.

    Args:
        filled: number of slots that earlier segments have filled, of each row.
        length: number of tokens and paddings of the segment, T.
        real: [B, T], False for padding; None: there is none.
        device: of the tokens.

    Attributes:
        ends: the slot behind the last token, of each row.
        first: the first slot that has to be computed in any row.
        last: the slot behind the last one that has to be.
    """

    def __init__(self, filled: Sequence[int], length: int, real: Tensor | None, device: torch.device) -> None:
        counts = [length] * len(filled) if real is None else real.sum(1).tolist()
        self.ends = [before + count for before, count in zip(filled, counts, strict=True)]
        self.first = min(filled)
        self.last = max(*self.ends, self.first + 1)
        self._places: Tensor | None = None
        if real is not None or len(set(filled)) > 1:
            real = torch.ones(len(filled), length, dtype=torch.bool, device=device) if real is None else real
            starts = torch.tensor(filled, device=device)[:, None] - self.first
            # Padding goes into a place behind all slots, which is cut off.
            self._places = torch.where(real, starts + real.cumsum(1) - 1, self.last - self.first)[..., None]

    def put(self, tokens: Tensor) -> Tensor:
        """[B, T, n] → [B, last − first, n], zeros where a row has no token."""
        if self._places is None:
            return tokens
        B, _, n = tokens.shape
        slots = tokens.new_zeros(B, self.last - self.first + 1, n)
        return slots.scatter(1, self._places.expand_as(tokens), tokens)[:, :-1]

    def take(self, slots: Tensor) -> Tensor:
        """Undo `put`; zeros where there was padding."""
        if self._places is None:
            return slots
        B, _, n = slots.shape
        return torch.cat([slots, slots.new_zeros(B, 1, n)], 1).gather(1, self._places.expand(-1, -1, n))
