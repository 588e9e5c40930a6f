r"""P V and its gradients in linear time and memory: a scan over chunks of C steps, in plain PyTorch.

`chunked_minimal` in reference.py is the same algorithm in its smallest form. A chunk is one matrix product,
(y, h') = M (v, h), with the M of `powers.py`. With s_n = write · v_n the states are

    h_{n+1} = z^C h_n + s_n,

the same scan on 1/C of the data, so it is chunked again. For a tile of heads, in the layout of `chunk_layout.py`, with
[·; ·] for rows below rows:

    forward     h = carry(write · V)              y  = [block, readout] · [V; h]
    backward    a = carryᵀ(readoutᵀ · dY)         dV = [block; write]ᵀ · [dY; a]
                dρ = ⟨[dY; a], ∂M/∂ρ · [V; h]⟩    for each rate ρ of the head

a_n is the gradient with respect to s_n. Only V is saved for the backward pass.

Chunks are short, because a product with a small matrix is bound by memory, and ∂M/∂ρ needs as many multiplications
again for each rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.chunk_layout import Layout, PackedLayout, PlainLayout
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.powers import Matrices
from rsa_hf.ops.types import Gradients, Rems, SoftmaxBranch, working_dtype
from rsa_hf.rem import mix

__all__ = ["scan_backward", "scan_forward"]

CHUNK = 16  # steps per chunk
SINGLE_CHUNK = 32  # a sequence of up to this many steps is one chunk, without states
TILE = 2**19  # numbers in the columns of a tile on a CPU (2 MB of float32)
SHORT = 2**14  # numbers per head up to which inner products of all heads are computed in one call


def scan_forward(value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None) -> Tensor:
    """P V, [B, H, T, D]; or, with `softmax`, (1 − g) · attention + g · P V, [B, T, H', D].

    Args:
        value: shape [B, Hv, S, D].
        rems: the heads.
        mask: which keys each query sees; without a sliding window and `visible`.
        softmax: attention's output and the gate, or None.
    """
    B, _, _, D = value.shape
    H, T = len(rems.kinds), mask.query_length
    if softmax is None:
        output = value.new_empty(B, H, T, D, dtype=working_dtype(value))
    else:
        output = torch.empty_like(softmax.attention, memory_format=torch.contiguous_format)
        output[:, :, H:] = softmax.attention[:, :, H:]
    for tile in _tiles(value, rems, mask):
        columns = tile.multiply(tile.matrix[:, : tile.chunk], tile.with_states(tile.pack_keys(value)))
        if softmax is None:
            tile.unpack_queries(columns, output[:, tile.heads])
            continue
        product = value.new_empty(B, tile.num_heads, T, D, dtype=tile.dtype)
        tile.unpack_queries(columns, product)
        output[:, :, tile.heads] = mix(softmax.attention[:, :, tile.heads], product, softmax.gate[tile.heads])
    return output


def scan_backward(
    grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None
) -> Gradients:
    """The gradients of `scan_forward`, from the gradient of its output."""
    H = len(rems.kinds)
    # Shared value heads sum over several heads before they are rounded; value heads without readers get 0.
    dvalue = torch.empty_like(value, dtype=working_dtype(value) if rems.heads_per_value > 1 else None)
    (dvalue if rems.heads_per_value > 1 else dvalue[:, H:]).zero_()
    ddecay, dtheta = torch.zeros_like(rems.decay), torch.zeros_like(rems.theta)
    dattention = dgate = None
    if softmax is not None:
        dattention, dgate = torch.empty_like(softmax.attention), torch.zeros_like(softmax.gate)
        dattention[:, :, H:] = grad[:, :, H:]
        grad = grad.transpose(1, 2)
    for tile in _tiles(value, rems, mask, derivatives=True):
        heads = tile.heads
        dy = tile.with_adjoints(tile.pack_queries(grad[:, heads]))
        keys = tile.with_states(tile.pack_keys(value))
        dv = tile.multiply(tile.matrix[:, :, : tile.chunk].transpose(1, 2), dy)
        gate: Tensor | None = None
        if softmax is not None and dattention is not None and dgate is not None:
            gate = softmax.gate[heads].to(tile.dtype)
            attention, dmixed = softmax.attention[:, :, heads].to(tile.dtype), grad[:, heads].transpose(1, 2)
            # ⟨dY, P V⟩ = ⟨Pᵀ dY, V⟩, so P V itself is not needed.
            dgate[heads] = tile.dot(dv, keys[:, : tile.chunk]) - (attention * dmixed).sum((0, 1, 3))
            dattention[:, :, heads] = dmixed * (1 - gate)[:, None]
            dv.mul_(gate[:, None, None])
        tile.unpack_keys(dv, dvalue)
        for drate, derivative in zip((ddecay, dtheta), tile.derivatives, strict=False):
            change = tile.dot(tile.multiply(derivative, keys), dy)
            drate[heads] = change if gate is None else change * gate
    return Gradients(dvalue.to(value.dtype), ddecay, dtheta, dattention, dgate)


def _tiles(value: Tensor, rems: Rems, mask: AttentionMask, derivatives: bool = False) -> Iterator[_Tile]:
    """Cut the heads into runs of one dilation whose columns fit the processor's cache; on a GPU, into whole runs."""
    B, _, _, D = value.shape
    H, heads_per_value = len(rems.kinds), rems.heads_per_value
    # Slots of a static cache behind the last query are not seen.
    S = mask.query_offset + mask.query_length if mask.causal else mask.key_length
    most = H if value.device.type != "cpu" else max(TILE // max(B * S * D, 1), 1)
    dtype = working_dtype(value)
    scratch = _Scratch(value.device, dtype)
    for d in sorted(set(rems.dilation)):
        layout = _layout(S, d, mask)
        digits, doublings = (layout.digits, 0) if isinstance(layout, PlainLayout) else ((), layout.doublings)
        matrices = Matrices(rems, layout.chunk, digits, doublings, mask.causal, dtype, derivatives)
        for run in _runs(rems.dilation, d):
            start = run.start
            while start < run.stop:
                stop = min(start + most, run.stop)
                if heads_per_value > 1:
                    stop = min(stop, (start // heads_per_value + 1) * heads_per_value)
                heads = slice(start, stop)
                yield _Tile(heads, layout, matrices, mask, heads_per_value, scratch)
                start = stop


def _runs(dilation: tuple[int, ...], d: int) -> list[slice]:
    """Runs of neighbouring heads of dilation d."""
    edges = [h for h in range(len(dilation) + 1) if (dilation[h - 1 : h] == (d,)) != (dilation[h : h + 1] == (d,))]
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _layout(length: int, dilation: int, mask: AttentionMask) -> Layout:
    segments, key_mask = mask.segments, mask.key_mask
    if segments is None:
        steps = -(-length // dilation)
        key_mask = None if key_mask is None else key_mask[:, :length]
        return PlainLayout(length, max(steps, 1) if steps <= SINGLE_CHUNK else CHUNK, dilation, key_mask)
    if dilation not in segments.layouts:
        # All layers of a forward share it.
        chunk = min(max(segments.mean_length // dilation, 1), CHUNK)
        segments.layouts[dilation] = PackedLayout(segments, chunk, dilation, key_mask)
    layout: Layout = segments.layouts[dilation]
    return layout


class _Scratch:
    """Buffers that the tiles share: fresh pages cost more time than writing into them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self.buffers[name][:size].view(shape)


class _Tile:
    """Neighbouring heads of one dilation, and the columns that they are computed in."""

    def __init__(
        self,
        heads: slice,
        layout: Layout,
        matrices: Matrices,
        mask: AttentionMask,
        heads_per_value: int,
        scratch: _Scratch,
    ) -> None:
        self.heads, self.layout, self.matrices, self.scratch = heads, layout, matrices, scratch
        self.num_heads = heads.stop - heads.start
        self.heads_per_value, self.mask = heads_per_value, mask
        self.chunk, self.dtype = layout.chunk, scratch.dtype
        rows = self.chunk if layout.num_chunks == 1 else matrices.chunk.shape[-1]
        self.matrix = matrices.chunk[heads, :rows, :rows]
        self.derivatives = matrices.derivatives[:, heads, :rows, :rows]

    def pack_keys(self, value: Tensor) -> Tensor:
        """Copy V of these heads, from [B, Hv, S, D], into the first C rows of columns [g, C + states, N·B·d·D]."""
        steps = value[:, self.heads]
        if self.heads_per_value > 1:
            shared = self.heads.start // self.heads_per_value
            steps = value[:, shared : shared + 1].expand(-1, self.num_heads, -1, -1)
        columns, into = self._columns("keys", steps)
        self.layout.pack(steps[:, :, : self.layout.length], into)
        if self.layout.hidden_keys is not None:
            # Not multiplied by zeros: padding may hold NaN.
            into.masked_fill_(self.layout.hidden_keys, 0)
        return columns

    def unpack_keys(self, columns: Tensor, dvalue: Tensor) -> None:
        """Write the gradient of these heads' values, or add it if heads share a value head."""
        into = columns.view(self.num_heads, self.chunk, *self._shape(dvalue))
        if self.layout.hidden_keys is not None:
            into.masked_fill_(self.layout.hidden_keys, 0)
        length = self.layout.length
        if self.heads_per_value == 1:
            self.layout.unpack(into, dvalue[:, self.heads, :length])
            dvalue[:, self.heads, length:] = 0
            return
        shared = self.heads.start // self.heads_per_value
        total = dvalue.new_empty(len(dvalue), 1, length, dvalue.shape[3], dtype=self.dtype)
        self.layout.unpack(into.sum(0, keepdim=True), total)
        dvalue[:, shared : shared + 1, :length] += total

    def pack_queries(self, grad: Tensor) -> Tensor:
        """Copy the gradient of the output, [B, g, T, D], into columns like those of `pack_keys`."""
        start, stop, S = self.mask.query_offset, self.mask.query_offset + grad.shape[2], self.layout.length
        if stop - start < S:
            grad = F.pad(grad, (0, 0, start, S - stop))
        columns, into = self._columns("queries", grad)
        self.layout.pack(grad, into)
        return columns

    def unpack_queries(self, columns: Tensor, output: Tensor) -> None:
        """Copy the positions of the queries into [B, g, T, D]."""
        self.layout.unpack(
            columns.view(self.num_heads, self.chunk, *self._shape(output)), output, self.mask.query_offset
        )

    def with_states(self, columns: Tensor) -> Tensor:
        """Fill in the states that enter each chunk, in the rows below the chunk."""
        self._fill(columns, self.matrix[:, self.chunk :, : self.chunk], adjoint=False)
        return columns

    def with_adjoints(self, columns: Tensor) -> Tensor:
        """Fill in the gradients with respect to what each chunk writes into the states."""
        self._fill(columns, self.matrix[:, : self.chunk, self.chunk :].transpose(1, 2), adjoint=True)
        return columns

    def multiply(self, matrix: Tensor, columns: Tensor) -> Tensor:
        """A matrix of each head, [g, rows, n], times its columns, [g, n, X]."""
        return torch.bmm(matrix, columns, out=self.scratch("product", *matrix.shape[:2], columns.shape[2]))

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """The inner product of two tiles of columns, head by head: [g]."""
        if a[0].numel() <= SHORT:
            products: Tensor = torch.linalg.vecdot(a.flatten(1), b.flatten(1))
            return products
        return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(a, b, strict=True)])

    def _shape(self, steps: Tensor) -> tuple[int, int, int, int]:
        return self.layout.num_chunks, len(steps), self.layout.dilation, steps.shape[3]

    def _columns(self, name: str, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Columns for [B, g, S, D], and a view of the rows that hold the steps, [g, C, N, B, d, D]."""
        shape = self._shape(steps)
        columns = self.scratch(name, self.num_heads, self.matrix.shape[-1], math.prod(shape))
        return columns, columns[:, : self.chunk].view(self.num_heads, self.chunk, *shape)

    def _fill(self, columns: Tensor, write: Tensor, adjoint: bool) -> None:
        if self.layout.num_chunks == 1:
            return
        terms = write @ columns[:, : self.chunk]
        for i in range(0, terms.shape[1], 2):
            # The second state of an unmasked REM comes from the right; gradients flow in the opposite direction.
            carry = _Carry(self.matrices, self.heads, self.layout, reverse=(i > 0) != adjoint, conjugate=adjoint)
            columns[:, self.chunk + i : self.chunk + i + 2] = carry(terms[:, i : i + 2])


@dataclass(frozen=True, eq=False)
class _Carry:
    """The states from what the chunks write: h_n = Σ_{m<n} z^{C (n−1−m)} s_m over chunks of one segment.

    Attributes:
        matrices: matrices of all heads.
        heads: the heads of the tile.
        layout: layout of the chunks.
        reverse: sum over m > n instead.
        conjugate: use the conjugate of z.
    """

    matrices: Matrices
    heads: slice
    layout: Layout
    reverse: bool
    conjugate: bool

    def __call__(self, terms: Tensor) -> Tensor:
        """The states, [g, 2, N·W], of the terms s, [g, 2, N·W], rows (real, imaginary)."""
        terms = terms.contiguous()
        if isinstance(self.layout, PackedLayout):
            in_chunks = terms.view(len(terms), 2, self.layout.num_chunks, -1)
            return self._within_segments(in_chunks, self.layout).flatten(2)
        return self._level(terms, self.layout.digits).view(terms.shape)

    def _level(self, terms: Tensor, digits: tuple[int, ...], level: int = 0) -> Tensor:
        """Matrix products over M states, [g, 2·M, rest], and the same over what each group of M passes on."""
        g = len(terms)
        M = digits[level]
        carry, readout = self.matrices.level(level, self.reverse, self.conjugate)
        terms = terms.view(g, 2 * M, -1)
        if level + 1 == len(digits):
            return carry[self.heads, : 2 * M] @ terms
        carried = carry[self.heads] @ terms
        entering = self._level(carried[:, 2 * M :].contiguous(), digits, level + 1)
        return torch.baddbmm(carried[:, : 2 * M], readout[self.heads], entering.view(g, 2, -1))

    def _within_segments(self, terms: Tensor, layout: PackedLayout) -> Tensor:
        """Sums over 1, 2, 4, … chunks of a segment, each from two sums of the level before."""
        g, _, N, W = terms.shape

        def from_before(x: Tensor, distance: int) -> Tensor:
            """Terms from `distance` chunks before (behind, if reverse), 0 where that is another segment."""
            same = layout.same_segment(distance, W)
            if self.reverse:
                return F.pad(torch.where(same, x[:, :, distance:], 0), (0, 0, 0, distance))
            return F.pad(torch.where(same, x[:, :, : N - distance], 0), (0, 0, distance, 0))

        sums = terms
        for times in range(layout.doublings):
            power = self.matrices.doubled(times, self.conjugate)[self.heads]
            sums = sums + (power @ from_before(sums, 1 << times).view(g, 2, -1)).view(g, 2, N, W)
        return from_before(sums, 1)
