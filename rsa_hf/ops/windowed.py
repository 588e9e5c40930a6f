r"""P V in a sliding window of w positions, in linear time: each query sees itself and w − 1 positions back.

Cut the sequence into blocks of w. The window of row i of a block consists of the block up to row i, for which the scan
starts anew in each block, and the block before from its row i + 1 on. With u_k = v_{w−1−k}, the block before in
reverse, the second part is

    Σ_{j>i} f(w + i − j) v_j = read( z^{i+1} G_i ),   G_i = Σ_{k < w−1−i} z^k u_k,

a cumulative sum. Nothing is subtracted, so nothing cancels, however slow the decay.

A head dilated by d sees the lags d, 2d, … below w, so each of its sub-sequences has a window. An unmasked REM is this
plus its mirror image.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.chunked import scan_backward, scan_forward
from rsa_hf.ops.mask import AttentionMask, PackedSegments
from rsa_hf.ops.powers import kinds_mask, powers_table
from rsa_hf.ops.types import ProductGradients, Rems, working_dtype

__all__ = ["window_backward", "window_forward"]


def window_forward(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    """P V, [B, H, T, D], from values [B, Hv, S, D], for a mask with a sliding window and without `visible`."""
    keys = _keys(value, mask)
    B, _, S, D = keys.shape
    output = keys.new_zeros(B, len(rems.kinds), S, D)
    for heads, shared, windows in _parts(rems, mask, keys):
        for causal in windows:
            output[:, heads] += causal.turn(causal.forward(causal.turn(keys[:, shared])))
    return output[:, :, mask.query_offset : mask.query_offset + mask.query_length]


def window_backward(grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask) -> ProductGradients:
    """The gradients of `window_forward`, from the gradient of its output."""
    keys = _keys(value, mask)
    start, stop = mask.query_offset, mask.query_offset + mask.query_length
    grad = F.pad(grad.to(keys.dtype), (0, 0, start, mask.key_length - stop))
    dkeys = torch.zeros_like(keys)
    ddecay, dtheta = torch.zeros_like(rems.decay), torch.zeros_like(rems.theta)
    for heads, shared, windows in _parts(rems, mask, keys):
        for causal in windows:
            dv, of_heads = causal.backward(causal.turn(grad[:, heads]), causal.turn(keys[:, shared]))
            dkeys[:, shared] += causal.turn(dv)
            ddecay[heads] += of_heads[0].to(ddecay.dtype)
            dtheta[heads] += of_heads[1].to(dtheta.dtype)
    if mask.key_mask is not None:
        dkeys = torch.where(mask.key_mask[:, None, :, None], dkeys, 0)
    return ProductGradients(dkeys.to(value.dtype), ddecay, dtheta)


def _keys(value: Tensor, mask: AttentionMask) -> Tensor:
    """V in the working dtype, 0 where no query sees it."""
    keys = value.to(working_dtype(value))
    stop = mask.query_offset + mask.query_length
    if mask.causal and stop < mask.key_length:
        keys = F.pad(keys[:, :, :stop], (0, 0, 0, mask.key_length - stop))
    # Not multiplied by zeros: padding may hold NaN.
    return keys if mask.key_mask is None else torch.where(mask.key_mask[:, None, :, None], keys, 0)


def _parts(
    rems: Rems, mask: AttentionMask, keys: Tensor
) -> Iterator[tuple[list[int], list[int], list[_CausalWindow]]]:
    """Groups of heads of one dilation that each read a different value head.

    Yields:
        The heads, the value heads that they read, and the causal windows whose sum is P V.
    """
    assert mask.sliding_window is not None
    segment_ids = None if mask.segments is None else mask.segments.index
    heads_per_value = rems.heads_per_value
    for d, of_group in itertools.product(sorted(set(rems.dilation)), range(heads_per_value)):
        heads = [h for h, of_head in enumerate(rems.dilation) if of_head == d and h % heads_per_value == of_group]
        if not heads:
            continue
        kinds = tuple(rems.kinds[h] for h in heads)
        mine = Rems(kinds, rems.decay[heads], rems.theta[heads], (d,) * len(heads), 1)
        steps = (mask.sliding_window - 1) // d + 1  # the lags 0, d, 2d, … below w
        windows = [_CausalWindow(mine, d, steps, segment_ids, backwards=False)]
        if not mask.causal:
            turned = None if segment_ids is None else segment_ids.flip(1)
            windows.append(_CausalWindow(mine, d, steps, turned, backwards=True))
        yield heads, [h // heads_per_value for h in heads], windows


class _CausalWindow:
    """Causal P V of heads of one dilation in a sliding window.

    Args:
        rems: the heads.
        dilation: d of all heads.
        steps: length of the window in each of the d sub-sequences.
        segment_ids: shape [B, S], in the order that `turn` gives; or None.
        backwards: whether the sequence is reversed.
    """

    def __init__(self, rems: Rems, dilation: int, steps: int, segment_ids: Tensor | None, backwards: bool) -> None:
        self.rems, self.dilation, self.steps, self.backwards = rems, dilation, steps, backwards
        self.segment_ids = segment_ids

    def turn(self, x: Tensor) -> Tensor:
        """[B, h, S, D], reversed in time if this window looks ahead."""
        return x.flip(2) if self.backwards else x

    def forward(self, keys: Tensor) -> Tensor:
        """P V, [B, h, S, D], of keys of that shape."""
        own = scan_forward(self._as_rows(keys), self.rems, self._in_blocks(), None)
        output = self._from_rows(own, keys)
        if output.shape[2] > 1:
            read, write = self._tables(keys)
            sums = (write[0] * self._ends(keys)).cumsum(dim=-2)
            output[:, :, 1:, : self.steps - 1] += self._reached((read[0] * sums.flip(-2)).sum(0), keys)
        return self._unblocked(output, keys)

    def backward(self, grad: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients with respect to keys, [B, h, S, D], and to λ or γ and θ, [2, h]."""
        own = scan_backward(self._as_rows(grad), self._as_rows(keys), self.rems, self._in_blocks(), None)
        dkeys, drates = self._from_rows(own.value, keys), torch.stack([own.decay, own.theta]).to(keys.dtype)
        if dkeys.shape[2] > 1:
            read, write = self._tables(keys, derivatives=True)
            ends, dy = self._ends(keys), self._reached(self._blocks(grad)[:, :, 1:, : self.steps - 1], keys)
            sums = (write[0] * ends).cumsum(dim=-2)
            dsums = (read[0] * dy).cumsum(dim=-2).flip(-2)
            # Both tables of powers depend on the rates.
            dread, dwrite = (torch.einsum("pbhnkw,bhnkw->phk", x, y) for x, y in ((sums.flip(-2), dy), (dsums, ends)))
            for drate, of_read, of_write in zip(drates, read[1:], write[1:], strict=False):
                drate += (of_read[:, 0, :, 0, :, 0] * dread + of_write[:, 0, :, 0, :, 0] * dwrite).sum((0, 2))
            dkeys[:, :, :-1, 1:] += self._kept((write[0] * dsums).sum(0).flip(-2), keys)
        return self._unblocked(dkeys, keys), drates

    def _tables(self, keys: Tensor, derivatives: bool = False) -> tuple[Tensor, Tensor]:
        """How row i reads G_i, by z^{i+1}, and how u_k is written into it, by z^k, for i, k = 0 … w − 2.

        Returns:
            [1, 2, 1, h, 1, w − 1, 1] each, the 2 being the real and the imaginary part of G; with derivatives 2 or 3
            of them, by what they are derived.
        """
        exponents = torch.arange(self.steps, device=keys.device)
        real, imaginary = powers_table(self.rems, exponents, keys.dtype, derivatives)
        is_sin = kinds_mask(self.rems.kinds, ("sin",), keys.device)
        read = torch.stack([torch.where(is_sin, imaginary, real), torch.where(is_sin, real, -imaginary)], dim=1)
        write = torch.stack([real, imaginary], dim=1)
        return read[:, :, None, :, None, 1:, None], write[:, :, None, :, None, :-1, None]

    def _ends(self, keys: Tensor) -> Tensor:
        """The part of each block that the next one may read, in reverse: [B, h, blocks − 1, w − 1, d·D]."""
        return self._kept(self._blocks(keys)[:, :, :-1, 1:], keys).flip(-2)

    def _kept(self, before: Tensor, keys: Tensor) -> Tensor:
        """0 where a position is not of the segment that continues in the next block."""
        return self._where_same(before, keys, lambda index: (index[:, :-1, 1:], index[:, :-1, -1:, -1:]))

    def _reached(self, rows: Tensor, keys: Tensor) -> Tensor:
        """0 where a row is not of the segment that continues from the block before."""
        return self._where_same(rows, keys, lambda index: (index[:, 1:, :-1], index[:, :-1, -1:, -1:]))

    def _where_same(self, x: Tensor, keys: Tensor, pick: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        if self.segment_ids is None:
            return x
        index, last = pick(self._blocks(self.segment_ids[:, None, :, None])[:, 0])
        same = (index == last).repeat_interleave(keys.shape[3], dim=-1)
        return torch.where(same[:, None], x, 0)

    def _blocks(self, x: Tensor) -> Tensor:
        """[B, h, S, D] as [B, h, blocks, w, d·D], padded at the end."""
        B, h, S, D = x.shape
        width = self.steps * self.dilation
        return F.pad(x, (0, 0, 0, -S % width)).reshape(B, h, -1, self.steps, self.dilation * D)

    def _unblocked(self, blocks: Tensor, keys: Tensor) -> Tensor:
        B, h, S, D = keys.shape
        return blocks.reshape(B, h, -1, D)[:, :, :S]

    def _as_rows(self, x: Tensor) -> Tensor:
        """The blocks as rows of a batch: [B·blocks, h, w·d, D]."""
        _, h, _, D = x.shape
        return self._blocks(x).transpose(1, 2).reshape(-1, h, self.steps * self.dilation, D)

    def _from_rows(self, rows: Tensor, keys: Tensor) -> Tensor:
        B, h, _, D = keys.shape
        return rows.reshape(B, -1, h, self.steps, self.dilation * D).transpose(1, 2).contiguous()

    def _in_blocks(self) -> AttentionMask:
        width = self.steps * self.dilation
        segments = None
        if self.segment_ids is not None:
            segments = PackedSegments(self._as_rows(self.segment_ids[:, None, :, None])[:, 0, :, 0])
        return AttentionMask(width, width, 0, True, segments=segments)
