"""The layout of a sequence in the columns that the scan multiplies.

A tile of g heads is laid out as [g, C, N, B, d·D]: step i of chunk n of row b. Every product with a head's matrix is
then one matrix product over all chunks and rows. A head dilated by d is its base head on d interleaved sub-sequences,
so a step is d·D wide. Each packed segment begins a new chunk, so no chunk holds two of them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.mask import PackedSegments

__all__ = ["Layout", "PackedLayout", "PlainLayout"]

MOST_STATES = 16  # per level: matrices stay small, and 65,536 steps in chunks of 16 need three levels


class PlainLayout:
    """A sequence of S positions in chunks of C steps, each d positions wide, padded with zeros.

    States are passed on in levels of up to 16, so chunk n = m_0 + M_0 (m_1 + M_1 (m_2 + …)) is stored at
    (m_0, m_1, m_2, …), the first digit slowest. At each level the states are then rows of a matrix, and nothing has
    to be moved.

    Args:
        length: S.
        chunk: C.
        dilation: d.
        key_mask: [B or 1, S], False for keys that count as zeros; or None.
    """

    def __init__(self, length: int, chunk: int, dilation: int, key_mask: Tensor | None) -> None:
        self.length, self.chunk, self.dilation = length, chunk, dilation
        self.digits = _digits(-(-length // (chunk * dilation)))
        self.num_chunks = math.prod(self.digits)
        self.hidden_keys: Tensor | None = None
        if key_mask is not None:
            shape = (1, chunk, self.num_chunks, len(key_mask), dilation, 1)
            hidden = torch.empty(shape, dtype=torch.bool, device=key_mask.device)
            self.pack(~key_mask[:, None, :, None], hidden)
            self.hidden_keys = hidden

    def pack(self, steps: Tensor, columns: Tensor) -> None:
        """Write [B, g, S, D] into columns [g, C, N, B, d, D], converting the dtype."""
        in_time = self._in_time(columns)
        width = self.chunk * self.dilation * math.prod(self.digits[:-1])
        full, rest = divmod(self.length, width)
        if full:
            in_time[:, :, :full].copy_(self._in_chunks(steps, full))
        if rest:
            last = F.pad(steps[:, :, full * width :], (0, 0, 0, width - rest))
            in_time[:, :, full : full + 1].copy_(self._in_chunks(last, 1))
        if full + (rest > 0) < self.digits[-1]:
            in_time[:, :, full + (rest > 0) :] = 0

    def unpack(self, columns: Tensor, steps: Tensor, start: int = 0) -> None:
        """Write positions `start` … `start` + T − 1 of columns [g, C, N, B, d, D] into [B, g, T, D]."""
        in_time = self._in_time(columns)
        width = self.chunk * self.dilation * math.prod(self.digits[:-1])
        if start:
            # Only the blocks with queries are moved, not a memory before them.
            first, before = divmod(start, width)
            stop = before + steps.shape[2]
            blocks = in_time[:, :, first : first - (-stop // width)]
            steps.copy_(blocks.flatten(2, -2)[:, :, before:stop])
            return
        full, rest = divmod(steps.shape[2], width)
        if full:
            self._in_chunks(steps, full).copy_(in_time[:, :, :full])
        if rest:
            steps[:, :, full * width :].copy_(in_time[:, :, full].flatten(2, -2)[:, :, :rest])

    def _in_time(self, columns: Tensor) -> Tensor:
        """A view of the columns in the order of time: [B, g, …, M_1, M_0, C, d, D]."""
        g, C, _, B, d, D = columns.shape
        n = len(self.digits)
        order = (n + 2, 0, *range(n + 1, 1, -1), 1, n + 3, n + 4)
        return columns.view(g, C, *self.digits, B, d, D).permute(order)

    def _in_chunks(self, steps: Tensor, top: int) -> Tensor:
        """A view of the first positions of [B, g, S, D]: [B, g, top, …, M_1, M_0, C, d, D]."""
        B, g, _, D = steps.shape
        shape = (top, *self.digits[-2::-1], self.chunk, self.dilation)
        return steps[:, :, : math.prod(shape)].view(B, g, *shape, D)


def _digits(number: int) -> tuple[int, ...]:
    """Factors of at most 16 whose product is `number` or slightly more."""
    if number <= MOST_STATES:
        return (max(number, 1),)
    rest = -(-number // MOST_STATES)
    return (-(-number // rest), *_digits(rest))


class PackedLayout:
    """Packed rows in which every segment begins a new chunk.

    Segments of at most d positions contain no lag of d and are left out, so the number of columns stays within a
    constant factor of the number of positions for every dilation.

    Args:
        segments: the segments of the rows.
        chunk: C.
        dilation: d.
        key_mask: [B or 1, S], False for keys that count as zeros; or None.
    """

    def __init__(self, segments: PackedSegments, chunk: int, dilation: int, key_mask: Tensor | None) -> None:
        self.chunk, self.dilation = chunk, dilation
        B, S = segments.index.shape
        self.length = S
        device = segments.index.device
        width = chunk * dilation
        lengths = torch.where(segments.lengths > dilation, segments.lengths, 0)
        chunks = -(-lengths // width)
        ends = chunks.cumsum(1)
        self.num_chunks = max(int(ends[:, -1].max()), 1)
        slot = (ends - chunks).gather(1, segments.index) * width + segments.positions
        taken = lengths.gather(1, segments.index) > 0
        # Columns are ordered by (step, chunk, row, residue).
        n, rest = slot // width, slot % width
        row = torch.arange(B, device=device)[:, None]
        column = ((rest // dilation * self.num_chunks + n) * B + row) * dilation + rest % dilation
        size = width * self.num_chunks * B
        position = row * S + torch.arange(S, device=device)
        self.source = torch.zeros(size, dtype=torch.long, device=device)
        self.source[column[taken]] = position[taken]
        hidden = torch.ones(size, dtype=torch.bool, device=device)
        hidden[column[taken]] = False
        self.hidden = hidden.reshape(1, chunk, self.num_chunks, B, dilation, 1)
        self.hidden_keys: Tensor | None = None
        if key_mask is not None:
            keys = key_mask.expand(B, -1)
            self.hidden_keys = self.hidden | ~keys.flatten()[self.source].reshape(self.hidden.shape)
        self.target = torch.where(taken, column, 0)
        self.left_out = None if bool(taken.all()) else ~taken[:, None, :, None]
        # [N, B]: the segment of each chunk.
        order = torch.arange(self.num_chunks, device=device).expand(B, -1).contiguous()
        self.segment = torch.searchsorted(ends, order, right=True).T.contiguous()
        self.doublings = (max(int(chunks.max()), 1) - 1).bit_length()

    def same_segment(self, distance: int, width: int) -> Tensor:
        """Whether chunks n and n + distance are of one segment: [N − distance, width], width / B columns per row."""
        same = self.segment[distance:] == self.segment[: self.num_chunks - distance]
        return same.repeat_interleave(width // same.shape[1], dim=1)

    def pack(self, steps: Tensor, columns: Tensor) -> None:
        """Write [B, g, S, D] into columns [g, C, N, B, d, D], converting the dtype."""
        for head, into in zip(steps.unbind(1), columns, strict=True):
            rows = head.reshape(-1, head.shape[-1])
            into.copy_(rows.index_select(0, self.source).reshape(into.shape))
        columns.masked_fill_(self.hidden, 0)

    def unpack(self, columns: Tensor, steps: Tensor, start: int = 0) -> None:
        """Write positions `start` … `start` + T − 1 of columns [g, C, N, B, d, D] into [B, g, T, D]."""
        stop = start + steps.shape[2]
        target = self.target[:, start:stop].reshape(-1)
        for head, out in zip(columns, steps.unbind(1), strict=True):
            rows = head.reshape(-1, head.shape[-1])
            out.copy_(rows.index_select(0, target).reshape(out.shape))
        if self.left_out is not None:
            steps.masked_fill_(self.left_out[:, :, start:stop], 0)


Layout = PlainLayout | PackedLayout
