r"""P V and its gradients in linear time and memory: a scan over chunks of C steps, in plain PyTorch.

`chunked_minimal` in reference.py is the same algorithm in its smallest form. A chunk v of C steps that is entered with
the state h = Σ_{j≥0} z^j v_{−1−j} gives

    y_i = Σ_{j<i} f(i − j) v_j + read(z^{i+1} h)        h' = z^C h + Σ_j z^{C−1−j} v_j

which is one real matrix of each head, (y, h') = M (v, h), with a row for the real part of h and one for the imaginary:

    M = [ block  readout ]      block[i, j] = f(i − j) where i > j, else 0
        [ write  z^C     ]

An unmasked REM also has a state that comes from the right, hence two more rows and columns, and |i − j| for i − j.

With s_n = write · v_n the states are h_{n+1} = z^C h_n + s_n, the same scan on 1/C of the data, so it is chunked again
("carry"). With [·; ·] for rows below rows,

    forward     h = carry(write · V)              y  = [block, readout] · [V; h]
    backward    a = carryᵀ(readoutᵀ · dY)         dV = [block; write]ᵀ · [dY; a]
                dρ = ⟨[dY; a], ∂M/∂ρ · [V; h]⟩    for each rate ρ of the head

a_n is the gradient with respect to s_n. Only V is saved for the backward pass. Chunks are short: a product with a
small matrix is bound by memory, and ∂M/∂ρ needs as many multiplications again for each rate.

A tile of g neighbouring heads is laid out in columns [g, C, N, B, d·D]: step i of chunk n of row b. So every product
with a head's matrix is one matrix product over all chunks and rows. A head dilated by d is its base head on d
interleaved sub-sequences, so a step is d·D wide. `_PlainLayout` and `_PackedLayout` move positions to columns, and
carry states from chunk to chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask, PackedSegments
from rsa_hf.ops.types import Gradients, SoftmaxBranch
from rsa_hf.rem import Rems, complex_powers, is_kind, kept_constants, mix, other_heads, working_dtype

__all__ = ["copy_other_heads", "empty_output", "scan_backward", "scan_forward", "seen_keys"]

CHUNK = 16  # steps per chunk
SINGLE_CHUNK = 32  # a sequence of up to this many steps is one chunk, without states
MOST_STATES = 16  # per level of the carry: matrices stay small, and 65,536 steps in chunks of 16 need three levels
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
    keys, output = seen_keys(value, mask), empty_output(value, rems, mask, softmax)
    if softmax is not None:
        copy_other_heads(softmax.attention, output, rems)
    for tile in _tiles(keys, rems, mask):
        columns = tile.multiply(tile.matrix[:, : tile.chunk], tile.pack("keys", tile.keys_of(keys)))
        if softmax is None:
            tile.unpack(columns, output[:, tile.heads], mask.query_offset)
            continue
        product = tile.scratch("mixed", len(value), tile.num_heads, mask.query_length, value.shape[3])
        tile.unpack(columns, product, mask.query_offset)
        attention, gate = softmax.attention[:, :, tile.places], softmax.gate[tile.heads]
        output[:, :, tile.places] = mix(attention, product, gate, tuple(range(tile.num_heads)))
    return output


def scan_backward(
    grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None
) -> Gradients:
    """The gradients of `scan_forward`, from the gradient of its output."""
    keys = seen_keys(value, mask)
    S, is_shared = keys.shape[2], rems.heads_per_value > 1
    # Shared value heads sum over several heads before they are rounded; value heads without readers get 0.
    dvalue = torch.empty_like(value, dtype=working_dtype(value) if is_shared else None)
    if is_shared:
        dvalue.zero_()
    for unread in other_heads(rems.heads, dvalue.shape[1]):
        dvalue[:, unread] = 0
    dvalue[:, :, S:] = 0
    ddecay, dtheta = torch.zeros_like(rems.decay), torch.zeros_like(rems.theta)
    dattention = dgate = None
    if softmax is not None:
        dattention, dgate = torch.empty_like(softmax.attention), torch.zeros_like(softmax.gate)
        copy_other_heads(grad, dattention, rems)
        grad = grad.transpose(1, 2)
    before, behind = mask.query_offset, S - mask.query_offset - mask.query_length
    for tile in _tiles(keys, rems, mask, derivatives=True):
        heads, places = tile.heads, tile.places
        dmixed = grad[:, places]
        dy = tile.pack("queries", F.pad(dmixed, (0, 0, before, behind)) if before or behind else dmixed, adjoint=True)
        v = tile.pack("keys", tile.keys_of(keys))
        dv = tile.multiply(tile.matrix.mT[:, : tile.chunk], dy)
        gate: Tensor | None = None
        if softmax is not None and dattention is not None and dgate is not None:
            gate, attention = (x.to(dy.dtype) for x in (softmax.gate[heads], softmax.attention[:, :, places]))
            dmixed = dmixed.transpose(1, 2)
            # ⟨dY, P V⟩ = ⟨Pᵀ dY, V⟩, so P V itself is not needed.
            dgate[heads] = _dot(dv, v[:, : tile.chunk]) - (attention * dmixed).sum((0, 1, 3))
            dattention[:, :, places] = dmixed * (1 - gate)[:, None]
            dv.mul_(gate[:, None, None])
        if is_shared:
            total = dvalue.new_empty(len(value), 1, S, value.shape[3])
            tile.unpack(dv.sum(0, keepdim=True), total)
            dvalue[:, tile.value_heads, :S] += total
        else:
            tile.unpack(dv, dvalue[:, places, :S])
        for drate, derivative in zip((ddecay, dtheta), tile.derivatives, strict=False):
            change = _dot(tile.multiply(derivative, v), dy)
            drate[heads] = change if gate is None else change * gate
    if mask.key_mask is not None:
        dvalue.masked_fill_(~mask.key_mask[:, None, :, None], 0)
    return Gradients(dvalue.to(value.dtype), ddecay, dtheta, dattention, dgate)


def empty_output(value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None) -> Tensor:
    """An uninitialised tensor of the shape, dtype and layout of P V, or of eq. 4."""
    if softmax is not None:
        return torch.empty_like(softmax.attention, memory_format=torch.contiguous_format)
    shape = (len(value), len(rems.kinds), mask.query_length, value.shape[3])
    return value.new_empty(shape, dtype=working_dtype(value))


def copy_other_heads(layer: Tensor, into: Tensor, rems: Rems) -> None:
    """Copy the plain heads of [B, T, H', D]."""
    for plain in other_heads(rems.heads, layer.shape[2]):
        into[:, :, plain] = layer[:, :, plain]


def seen_keys(value: Tensor, mask: AttentionMask) -> Tensor:
    """V, 0 where padding hides it, up to the last key that a query can see: [B, Hv, S' ≤ S, D]."""
    keys = value
    if mask.causal and mask.query_offset + mask.query_length < mask.key_length:
        # A static cache: slots after the last query. Segments have a place for each slot.
        keys = value[:, :, : mask.query_offset + mask.query_length]
        keys = keys if mask.segments is None else F.pad(keys, (0, 0, 0, mask.key_length - keys.shape[2]))
    # Not multiplied by zeros: padding may hold NaN.
    return keys if mask.key_mask is None else torch.where(mask.key_mask[:, None, : keys.shape[2], None], keys, 0)


# --- tiles of heads -------------------------------------------------------------------------------------------------


def _tiles(keys: Tensor, rems: Rems, mask: AttentionMask, derivatives: bool = False) -> Iterator[_Tile]:
    """Neighbouring heads, of one dilation, whose columns fit the processor's cache; on a GPU, all neighbours."""
    B, _, S, D = keys.shape
    shared = rems.heads_per_value
    most = len(rems.heads) if keys.device.type != "cpu" else max(TILE // max(B * S * D, 1), 1)
    described = list(zip(rems.heads, rems.dilation, strict=True))

    def continues(h: int, size: int) -> bool:
        """Whether head h belongs to the tile of `size` heads before it."""
        (before, d), (head, own) = described[h - 1 : h + 1]
        return own == d and head == before + 1 and size < most and (shared == 1 or head % shared > 0)

    tiles, start = [], 0
    for stop in range(1, len(described) + 1):
        if stop == len(described) or not continues(stop, stop - start):
            tiles.append((rems.dilation[start], slice(start, stop)))
            start = stop
    scratch = _Scratch(keys.device, working_dtype(keys))
    for d, of_dilation in itertools.groupby(sorted(tiles, key=itemgetter(0)), key=itemgetter(0)):
        layout = _layout(S, d, mask)
        matrices = _matrices(rems, layout, mask.causal, scratch.dtype, derivatives)
        for _, heads in of_dilation:
            yield _Tile(heads, rems, layout, matrices, scratch)


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
    """Neighbouring heads of one dilation, their matrices, and the columns that they are computed in.

    Attributes:
        heads: which of the RSA heads.
        places: where they are among all heads of the layer.
        value_heads: the value heads that they read.
    """

    def __init__(self, heads: slice, rems: Rems, layout: _Layout, matrices: _Matrices, scratch: _Scratch) -> None:
        self.heads, self.layout, self.scratch = heads, layout, scratch
        self.num_heads, self.chunk = heads.stop - heads.start, layout.chunk
        first, shared = rems.heads[heads.start], rems.heads_per_value
        self.places = slice(first, first + self.num_heads)
        self.value_heads = self.places if shared == 1 else slice(first // shared, first // shared + 1)
        n = self.chunk if layout.num_chunks == 1 else matrices.chunk.shape[-1]
        self.matrix = matrices.chunk[heads, :n, :n]
        self.derivatives = matrices.derivatives[:, heads, :n, :n]
        self.carries = [[power[heads] for power in of_side] for of_side in matrices.carries]

    def keys_of(self, keys: Tensor) -> Tensor:
        """V of these heads, [B, g, S, D]."""
        return keys[:, self.value_heads].expand(-1, self.num_heads, -1, -1)

    def pack(self, name: str, steps: Tensor, adjoint: bool = False) -> Tensor:
        """Columns of [B, g, S, D], and below them the states that enter each chunk: [g, C + states, N·B·d·D].

        Args:
            name: name of the buffer for the columns.
            steps: V; or dY for `adjoint`, which fills in the gradients with respect to what each chunk writes.
            adjoint: whether to go through the transposed matrices.
        """
        C, matrix = self.chunk, self.matrix.mT if adjoint else self.matrix
        shape = self._shape(steps)
        columns = self.scratch(name, self.num_heads, matrix.shape[-1], math.prod(shape))
        self.layout.pack(steps, columns[:, :C].view(self.num_heads, C, *shape))
        if self.layout.num_chunks > 1:
            terms = matrix[:, C:, :C] @ columns[:, :C]
            for i, carry in enumerate(self.carries):
                rows = slice(2 * i, 2 * i + 2)
                # The second state of an unmasked REM comes from the right.
                columns[:, C:][:, rows] = self.layout.carry(terms[:, rows], carry, from_right=i == 1, adjoint=adjoint)
        return columns

    def unpack(self, columns: Tensor, steps: Tensor, start: int = 0) -> None:
        """Copy columns [g, C, N·B·d·D] of the positions from `start` on into [B, g, T, D]."""
        self.layout.unpack(columns.view(len(columns), self.chunk, *self._shape(steps)), steps, start)

    def multiply(self, matrix: Tensor, columns: Tensor) -> Tensor:
        """A matrix of each head, [g, rows, n], times its columns, [g, n, X], in a buffer that the next call reuses."""
        return torch.bmm(matrix, columns, out=self.scratch("product", *matrix.shape[:2], columns.shape[2]))

    def _shape(self, steps: Tensor) -> tuple[int, int, int, int]:
        return self.layout.num_chunks, len(steps), self.layout.dilation, steps.shape[3]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of two tiles of columns, head by head: [g]."""
    if a[0].numel() <= SHORT:
        products: Tensor = torch.linalg.vecdot(a.flatten(1), b.flatten(1))
        return products
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(a, b, strict=True)])


# --- layouts: positions to columns, and states from chunk to chunk --------------------------------------------------


def _layout(length: int, dilation: int, mask: AttentionMask) -> _Layout:
    if mask.segments is None:
        steps = -(-length // dilation)
        return _PlainLayout(length, max(steps, 1) if steps <= SINGLE_CHUNK else CHUNK, dilation)
    layouts = mask.segments.layouts  # all layers of a forward share them
    if dilation not in layouts:
        chunk = min(max(mask.segments.mean_length // dilation, 1), CHUNK)
        layouts[dilation] = _PackedLayout(mask.segments, chunk, dilation)
    layout: _Layout = layouts[dilation]
    return layout


class _PlainLayout:
    """A sequence of S positions in chunks of C steps, each d positions wide, padded with zeros.

    States are carried in levels of up to 16, so chunk n = m_0 + M_0 (m_1 + M_1 (m_2 + …)) is stored at
    (m_0, m_1, m_2, …), the first digit slowest. At each level the states are then rows of a matrix, and nothing has
    to be moved.
    """

    doublings = 0

    def __init__(self, length: int, chunk: int, dilation: int) -> None:
        self.chunk, self.dilation = chunk, dilation
        self.digits = _digits(-(-length // (chunk * dilation)))
        self.num_chunks = math.prod(self.digits)
        self.block = chunk * dilation * math.prod(self.digits[:-1])  # positions for each value of the last digit

    def pack(self, steps: Tensor, columns: Tensor) -> None:
        """Write [B, g, S, D] into columns [g, C, N, B, d, D], converting the dtype."""
        blocks = self._in_time(columns)
        full, rest = divmod(steps.shape[2], self.block)
        if full:
            blocks[:, :, :full] = self._in_blocks(steps, full)
        if rest:
            last = F.pad(steps[:, :, full * self.block :], (0, 0, 0, self.block - rest))
            blocks[:, :, full : full + 1] = self._in_blocks(last, 1)
        if full + (rest > 0) < self.digits[-1]:
            blocks[:, :, full + (rest > 0) :] = 0

    def unpack(self, columns: Tensor, steps: Tensor, start: int) -> None:
        """Write positions `start` … `start` + T − 1 of columns [g, C, N, B, d, D] into [B, g, T, D]."""
        blocks = self._in_time(columns)
        if start:
            # Only the blocks with queries are moved, not a memory before them.
            first, before = divmod(start, self.block)
            stop = before + steps.shape[2]
            steps.copy_(blocks[:, :, first : first - (-stop // self.block)].flatten(2, -2)[:, :, before:stop])
            return
        full, rest = divmod(steps.shape[2], self.block)
        if full:
            self._in_blocks(steps, full).copy_(blocks[:, :, :full])
        if rest:
            steps[:, :, full * self.block :] = blocks[:, :, full].flatten(2, -2)[:, :, :rest]

    def _in_time(self, columns: Tensor) -> Tensor:
        """A view of the columns in the order of time: [B, g, …, M_1, M_0, C, d, D]."""
        n = len(self.digits)
        digits = columns.view(*columns.shape[:2], *self.digits, *columns.shape[3:])
        return digits.permute(n + 2, 0, *range(n + 1, 1, -1), 1, n + 3, n + 4)

    def _in_blocks(self, steps: Tensor, count: int) -> Tensor:
        """A view of the first positions of [B, g, S, D]: [B, g, count, …, M_1, M_0, C, d, D]."""
        B, g, _, D = steps.shape
        shape = (count, *self.digits[-2::-1], self.chunk, self.dilation)
        return steps[:, :, : count * self.block].view(B, g, *shape, D)

    def carry(self, terms: Tensor, levels: list[Tensor], from_right: bool, adjoint: bool) -> Tensor:
        """h_n = Σ_{m<n} z^{C (n−1−m)} s_m over the chunks (m > n, from the right), or its transposed.

        Args:
            terms: s, [g, 2, N·W], rows (real, imaginary).
            levels: matrices of the levels, [g, 2·M + 2, 2·M + 2] each: from the terms of M neighbours and the state
                that enters them to their states and the state that leaves them.
            from_right: whether states come from the right; the matrices contain it.
            adjoint: whether to apply the transposed matrices.

        Returns:
            The states, [g, 2, N·W].
        """
        level, *others = levels
        level = level.mT.contiguous() if adjoint else level  # products of transposed views may round differently
        M = level.shape[-1] - 2
        columns = terms.view(len(terms), M, -1)
        if not others:
            return (level[:, :M, :M] @ columns).view(terms.shape)
        carried = level[:, :, :M] @ columns
        entering = self.carry(carried[:, M:], others, from_right, adjoint)
        states = torch.baddbmm(carried[:, :M], level[:, :M, M:], entering)
        return states.view(terms.shape)


def _digits(number: int) -> tuple[int, ...]:
    """Factors of at most 16 whose product is `number` or slightly more."""
    if number <= MOST_STATES:
        return (max(number, 1),)
    rest = -(-number // MOST_STATES)
    return (-(-number // rest), *_digits(rest))


class _PackedLayout:
    """Packed rows in which every segment begins a new chunk, so no chunk holds two of them.

    Segments of at most d positions contain no lag of d and are left out, so the number of columns stays within a
    constant factor of the number of positions for every dilation.
    """

    digits = ()

    def __init__(self, segments: PackedSegments, chunk: int, dilation: int) -> None:
        self.chunk, self.dilation = chunk, dilation
        B, S = segments.index.shape
        device = segments.index.device
        width = chunk * dilation
        lengths = torch.where(segments.lengths > dilation, segments.lengths, 0)
        chunks = -(-lengths // width)
        ends = chunks.cumsum(1)
        self.num_chunks = N = max(int(ends[:, -1].max()), 1)
        self.doublings = (max(int(chunks.max()), 1) - 1).bit_length()
        slot = (ends - chunks).gather(1, segments.index) * width + segments.positions
        taken = lengths.gather(1, segments.index) > 0
        # Columns are ordered by (step, chunk, row, residue).
        n, rest = slot // width, slot % width
        row = torch.arange(B, device=device)[:, None]
        column = ((rest // dilation * N + n) * B + row) * dilation + rest % dilation
        self.source = torch.zeros(width * N * B, dtype=torch.long, device=device)
        self.source[column[taken]] = (row * S + torch.arange(S, device=device))[taken]
        hidden = torch.ones_like(self.source, dtype=torch.bool)
        hidden[column[taken]] = False
        self.hidden = hidden.reshape(1, chunk, N, B, dilation, 1)
        self.target = torch.where(taken, column, 0)
        self.left_out = None if bool(taken.all()) else ~taken[:, None, :, None]
        # [N, B]: the segment of each chunk.
        order = torch.arange(N, device=device).expand(B, -1).contiguous()
        self.segment = torch.searchsorted(ends, order, right=True).T.contiguous()

    def pack(self, steps: Tensor, columns: Tensor) -> None:
        """Write [B, g, S, D] into columns [g, C, N, B, d, D], converting the dtype."""
        for head, into in zip(steps.unbind(1), columns, strict=True):
            rows = head.reshape(-1, head.shape[-1])
            into.copy_(rows.index_select(0, self.source).reshape(into.shape))
        columns.masked_fill_(self.hidden, 0)

    def unpack(self, columns: Tensor, steps: Tensor, start: int) -> None:
        """Write positions `start` … `start` + T − 1 of columns [g, C, N, B, d, D] into [B, g, T, D]."""
        stop = start + steps.shape[2]
        target = self.target[:, start:stop].reshape(-1)
        for head, out in zip(columns, steps.unbind(1), strict=True):
            rows = head.reshape(-1, head.shape[-1])
            out.copy_(rows.index_select(0, target).reshape(out.shape))
        if self.left_out is not None:
            steps.masked_fill_(self.left_out[:, :, start:stop], 0)

    def carry(self, terms: Tensor, powers: list[Tensor], from_right: bool, adjoint: bool) -> Tensor:
        """As in `_PlainLayout`, within segments: sums over 1, 2, 4, … chunks, each from two sums before.

        Args:
            terms: s, [g, 2, N·W], rows (real, imaginary).
            powers: z^C, z^{2C}, z^{4C}, …, [g, 2, 2] each.
            from_right: whether to sum over m > n.
            adjoint: whether to apply the transposed.
        """
        sums = terms.unflatten(2, (self.num_chunks, -1))  # [g, 2, N, W]
        per_row = sums.shape[3] // self.segment.shape[1]

        def shifted(x: Tensor, distance: int) -> Tensor:
            """Terms of the chunk `distance` before (after, from the right), 0 where that is another segment."""
            same = self.segment[distance:] == self.segment[: self.num_chunks - distance]
            same = same.repeat_interleave(per_row, dim=1)
            if from_right != adjoint:
                return F.pad(torch.where(same, x[:, :, distance:], 0), (0, 0, 0, distance))
            return F.pad(torch.where(same, x[:, :, : self.num_chunks - distance], 0), (0, 0, distance, 0))

        for i, power in enumerate(powers):
            power = power.mT if adjoint else power
            sums = sums + (power @ shifted(sums, 1 << i).flatten(2)).view(sums.shape)
        return shifted(sums, 1).flatten(2)


_Layout = _PlainLayout | _PackedLayout


# --- matrices -------------------------------------------------------------------------------------------------------


class _Matrices(NamedTuple):
    """The matrices of H heads for the chunks of a layout.

    Attributes:
        chunk: M, [H, n, n] with n = C + 2, for unmasked REMs C + 4.
        derivatives: ∂M/∂decay and, where a head is cyclical, ∂M/∂θ, [0, 1 or 2, H, n, n].
        carries: for the state from the left and, for unmasked REMs, from the right, what the layout's `carry` takes.
    """

    chunk: Tensor
    derivatives: Tensor
    carries: list[list[Tensor]]


def _matrices(rems: Rems, layout: _Layout, causal: bool, dtype: torch.dtype, derivatives: bool) -> _Matrices:
    """Every entry is 0, Re z^k or ± Im z^k for some k: a table of the powers, and the places of the entries in it.

    Gathered from a table of ∂z^k/∂ρ, a matrix is its own derivative.
    """
    digits = layout.digits if layout.num_chunks > 1 else ()
    exponents, chunk, carries = _places(layout.chunk, digits, layout.doublings, causal, rems.decay.device)
    real, imaginary = complex_powers(rems, exponents, dtype, derivatives)
    is_sin = is_kind(rems, ("sin",))
    read = [torch.where(is_sin, imaginary, real), torch.where(is_sin, real, -imaginary)]
    table = torch.cat([real, imaginary, -imaginary, *read, torch.zeros_like(real[..., :1])], dim=-1)

    def gathered(table: Tensor, places: Tensor) -> Tensor:
        return table.index_select(-1, places.flatten()).view(*table.shape[:-1], *places.shape)

    matrices = gathered(table, chunk)
    return _Matrices(matrices[0], matrices[1:], [[gathered(table[0], k) for k in of_side] for of_side in carries])


@kept_constants(32)
def _places(
    C: int, digits: tuple[int, ...], doublings: int, causal: bool, device: torch.device
) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Exponents k of the table, and the places of the entries of `_Matrices` in its rows.

    A row has the parts Re z^k, Im z^k, −Im z^k, what a readout takes of the real and of the imaginary part, and a 0.
    """
    steps_of_level = [C * math.prod(digits[:level]) for level in range(len(digits))]
    of_levels = [[step * k for k in range(M + 1)] for step, M in zip(steps_of_level, digits, strict=True)]
    exponents = [*range(C + 1), *itertools.chain(*of_levels), *(C << i for i in range(doublings))]
    count = len(exponents)
    real, imaginary, negative, read, read_imaginary, zero = (count * part for part in range(6))

    def place(part: int, k: Tensor) -> Tensor:
        return torch.where(k < 0, zero, part + k)

    def multiply(k: Tensor) -> Tensor:
        """By z^k, 0 where k < 0: from rows of states, real parts first, to rows of states."""
        first, second = [place(real, k), place(negative, k)], [place(imaginary, k), place(real, k)]
        return torch.cat([torch.cat(first, 1), torch.cat(second, 1)])

    i = torch.arange(C, device="cpu")
    lags = i[:, None] - i
    lags = lags if causal else lags.abs()
    block = torch.where(lags > 0, read + lags, zero)
    # The state enters row i as z^{i+1} h. From the right it is C − i steps away: the same entries, reversed.
    readout = torch.stack([read + i + 1, read_imaginary + i + 1], 1)
    write = torch.stack([real + i.flip(0), imaginary + i.flip(0)])
    step = multiply(torch.tensor([[C]], device="cpu"))
    if causal:
        chunk = torch.cat([torch.cat([block, readout], 1), torch.cat([write, step], 1)])
    else:
        none = torch.full_like(step, zero)
        top = torch.cat([block, readout, readout.flip(0)], 1)
        chunk = torch.cat([top, torch.cat([write, step, none], 1), torch.cat([write.flip(1), none, step], 1)])

    doubled = [multiply(torch.tensor([[count - doublings + i]], device="cpu")) for i in range(doublings)]
    carries = []
    for from_right in (False,) if causal else (False, True):
        levels, first = [], C + 1
        for M in digits:
            i = torch.arange(M, device="cpu")
            i = i.flip(0) if from_right else i  # steps from a state back to where its level is entered
            inside = i[:, None] - i - 1
            k = torch.full((M + 1, M + 1), -1, device="cpu")
            k[:M, :M] = torch.where(inside < 0, -1, first + inside)
            k[:M, M], k[M, :M] = first + i, first + M - 1 - i
            states_first = [*range(M), *range(M + 1, 2 * M + 1), M, 2 * M + 1]
            levels.append(multiply(k)[states_first][:, states_first])
            first += M + 1
        carries.append([places.to(device) for places in levels or doubled])
    return torch.tensor(exponents, device=device), chunk.to(device), carries
