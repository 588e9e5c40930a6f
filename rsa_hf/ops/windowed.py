r"""P V in a sliding window of w positions, in linear time: each query sees itself and w − 1 positions back.

Cut the sequence into blocks of w. The window of row i of a block consists of the block up to row i, for which the scan
restarts in each block, and the block before from its row i + 1 on. With u_k = v_{w−1−k}, the block before in reverse,
the second part is

    Σ_{j>i} f(w + i − j) v_j = read( z^{i+1} G_i ),   G_i = Σ_{k < w−1−i} z^k u_k,

a cumulative sum. Nothing is subtracted, so nothing cancels, however slow the decay.

A head dilated by d sees the lags d, 2d, … below w, so each of its sub-sequences has a window. An unmasked REM is this
plus its mirror image.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.chunked import scan_backward, scan_forward, seen_keys
from rsa_hf.ops.dense import keys_of_heads, to_value_heads
from rsa_hf.ops.mask import AttentionMask, PackedSegments
from rsa_hf.ops.types import Gradients
from rsa_hf.rem import Rems, complex_powers, is_kind

__all__ = ["window_backward", "window_forward"]


def window_forward(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    """P V, [B, H, T, D], from values [B, Hv, S, D], for a mask with a sliding window and without `visible`."""
    keys = keys_of_heads(seen_keys(value, mask), rems)
    output = torch.zeros_like(keys)
    for heads, window in _windows(rems, mask):
        output[:, heads] += window.forward(keys[:, heads])
    return output[:, :, mask.query_offset : mask.query_offset + mask.query_length]


def window_backward(grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask) -> Gradients:
    """The gradients of `window_forward`, from the gradient of its output."""
    keys = keys_of_heads(seen_keys(value, mask), rems)
    S, start, stop = keys.shape[2], mask.query_offset, mask.query_offset + mask.query_length
    grad = F.pad(grad.to(keys.dtype), (0, 0, start, S - stop))
    dkeys = torch.zeros_like(keys)
    ddecay, dtheta = torch.zeros_like(rems.decay), torch.zeros_like(rems.theta)
    for heads, window in _windows(rems, mask):
        dv, drates = window.backward(grad[:, heads], keys[:, heads])
        dkeys[:, heads] += dv
        ddecay[heads] += drates[0].to(ddecay.dtype)
        dtheta[heads] += drates[1].to(dtheta.dtype)
    if mask.key_mask is not None:
        dkeys = torch.where(mask.key_mask[:, None, :S, None], dkeys, 0)
    dkeys = F.pad(dkeys, (0, 0, 0, mask.key_length - S))
    return Gradients(to_value_heads(dkeys, value, rems), ddecay, dtheta)


def _windows(rems: Rems, mask: AttentionMask) -> Iterator[tuple[list[int] | slice, _CausalWindow]]:
    """Windows whose sum is P V, and the heads of each."""
    assert mask.sliding_window is not None
    for d in sorted(set(rems.dilation)):
        places = [h for h, of_head in enumerate(rems.dilation) if of_head == d]
        kinds = tuple(rems.kinds[h] for h in places)
        heads = slice(None) if len(places) == len(rems.kinds) else places  # a slice copies nothing
        of_dilation = Rems(
            kinds, rems.decay[heads], rems.theta[heads], (d,) * len(places), 1, tuple(range(len(places)))
        )
        steps = (mask.sliding_window - 1) // d + 1  # the lags 0, d, 2d, … below w
        for backwards in (False,) if mask.causal else (False, True):
            yield heads, _CausalWindow(of_dilation, d, steps, mask, backwards)


class _CausalWindow:
    """Causal P V of heads of one dilation in a sliding window.

    Blocks are [B, n, h, w, d·D], padded with zeros at the end.

    Args:
        rems: the heads.
        dilation: d of all heads.
        steps: w, length of the window in each of the d sub-sequences.
        mask: which keys each query sees.
        backwards: whether to go through the sequence in reverse.
    """

    def __init__(self, rems: Rems, dilation: int, steps: int, mask: AttentionMask, backwards: bool) -> None:
        self.rems, self.dilation, self.steps, self.backwards = rems, dilation, steps, backwards
        self.width = width = steps * dilation
        segments = self.kept = self.reached = None
        if mask.segments is not None:
            index = self._blocks(mask.segments.index[:, None, :, None])
            segments = PackedSegments(index.reshape(-1, width))
            # Which rows of a block are of the segment that continues in the next one, and which of those it reaches.
            last = index[:, :-1, :, -1:, -1:]
            self.kept, self.reached = index[:, :-1, :, 1:] == last, index[:, 1:, :, :-1] == last
        self.block_mask = AttentionMask(width, width, 0, True, segments=segments)

    def forward(self, keys: Tensor) -> Tensor:
        """P V, [B, h, S, D], of keys of that shape."""
        blocks = self._blocks(keys)
        output = scan_forward(self._rows(blocks), self.rems, self.block_mask, None).view_as(blocks)
        if blocks.shape[1] > 1:
            read, write = self._tables(keys)
            sums = (write[0] * self._ends(blocks)).cumsum(dim=-2)
            output[:, 1:, :, :-1] += _where(self.reached, (read[0] * sums.flip(-2)).sum(0))
        return self._unblocked(output, keys)

    def backward(self, grad: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients with respect to keys, [B, h, S, D], and to λ or γ and θ, [2, h]."""
        blocks, grads = self._blocks(keys), self._blocks(grad)
        own = scan_backward(self._rows(grads), self._rows(blocks), self.rems, self.block_mask, None)
        dkeys, drates = own.value.view_as(blocks), torch.stack([own.decay, own.theta]).to(keys.dtype)
        if blocks.shape[1] > 1:
            read, write = self._tables(keys, derivatives=True)
            ends, dy = self._ends(blocks), _where(self.reached, grads[:, 1:, :, :-1])
            sums = (write[0] * ends).cumsum(dim=-2)
            dsums = (read[0] * dy).cumsum(dim=-2).flip(-2)
            # Both tables of powers depend on the rates.
            dread, dwrite = (torch.einsum("pbnhkw,bnhkw->phk", x, y) for x, y in ((sums.flip(-2), dy), (dsums, ends)))
            for drate, of_read, of_write in zip(drates, read[1:], write[1:], strict=False):
                drate += (of_read[:, 0, 0, :, :, 0] * dread + of_write[:, 0, 0, :, :, 0] * dwrite).sum((0, 2))
            dkeys[:, :-1, :, 1:] += _where(self.kept, (write[0] * dsums).sum(0).flip(-2))
        return self._unblocked(dkeys, keys), drates

    def _tables(self, keys: Tensor, derivatives: bool = False) -> tuple[Tensor, Tensor]:
        """How row i reads G_i, by z^{i+1}, and how u_k is written into it, by z^k, for i, k = 0 … w − 2.

        Returns:
            [1, 2, 1, 1, h, w − 1, 1] each, the 2 being the real and the imaginary part of G; with derivatives 2 or 3
            of them, by what they are derived.
        """
        exponents = torch.arange(self.steps, device=keys.device)
        real, imaginary = complex_powers(self.rems, exponents, keys.dtype, derivatives)
        is_sin = is_kind(self.rems, ("sin",))
        read = torch.stack([torch.where(is_sin, imaginary, real), torch.where(is_sin, real, -imaginary)], dim=1)
        write = torch.stack([real, imaginary], dim=1)
        return read[:, :, None, None, :, 1:, None], write[:, :, None, None, :, :-1, None]

    def _ends(self, blocks: Tensor) -> Tensor:
        """The part of each block that the next one may read, in reverse: [B, n − 1, h, w − 1, d·D]."""
        return _where(self.kept, blocks[:, :-1, :, 1:]).flip(-2)

    def _blocks(self, x: Tensor) -> Tensor:
        x = x.flip(2) if self.backwards else x
        x = F.pad(x, (0, 0, 0, -x.shape[2] % self.width)).unflatten(2, (-1, self.steps, self.dilation))
        return x.flatten(4).transpose(1, 2).contiguous()

    def _unblocked(self, blocks: Tensor, like: Tensor) -> Tensor:
        x = blocks.transpose(1, 2).reshape(*like.shape[:2], -1, like.shape[3])[:, :, : like.shape[2]]
        return x.flip(2) if self.backwards else x

    def _rows(self, blocks: Tensor) -> Tensor:
        """The blocks as rows of a batch: [B·n, h, w·d, D]."""
        return blocks.view(-1, blocks.shape[2], self.width, blocks.shape[4] // self.dilation)


def _where(same: Tensor | None, x: Tensor) -> Tensor:
    """x, [B, n, h, w, d·D], 0 where a position is not `same`, [B, n, 1, w, d]."""
    if same is None:
        return x
    return torch.where(same.repeat_interleave(x.shape[4] // same.shape[4], dim=4), x, 0)
