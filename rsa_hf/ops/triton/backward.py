"""The gradients of `forward_kernel`, in one walk over dOut, V and attention."""

import triton
import triton.language as tl

from rsa_hf.ops.triton.forward import _add_readout, _entering_of
from rsa_hf.ops.triton.states import (
    _advance,
    _borders,
    _load_rows,
    _load_states,
    _of_head,
    _place_of_state,
    _positions,
    _program,
    _reading,
    _seen,
    _states_of_split,
    _store_rows,
    _sums,
    _walk_from_right,
    _writing,
)
from rsa_hf.ops.triton.tables import DWRITE, WRITE, _halves, _load_of_head, _multiply, _toeplitz


@triton.jit
def _inner_products(v, x, acc):
    """Add v xᵀ, [C, C], with no operand rounded."""
    if v.dtype != x.dtype:
        v, x = v.to(tl.float32), x.to(tl.float32)
    return tl.dot(v, tl.trans(x), acc, input_precision="tf32x3")


@triton.jit
def _add_slope_of_readout(sums, v, state, reading, reached):
    """Add ⟨v, Re(z^k h)⟩ and its complex derivative, channel by channel, to three sums, [BLOCK] each."""
    product, slope, imaginary_slope = sums
    h_real, h_imaginary, q_real, q_imaginary = state
    real, imaginary, change, imaginary_change = reading
    p, p_imaginary = _sums(v, real * reached, imaginary * reached)
    s, s_imaginary = _sums(v, change * reached, imaginary_change * reached)
    product += p * h_real - p_imaginary * h_imaginary
    slope += s * h_real - s_imaginary * h_imaginary + p * q_real - p_imaginary * q_imaginary
    imaginary_slope += s * h_imaginary + s_imaginary * h_real + p * q_imaginary + p_imaginary * q_real
    return product, slope, imaginary_slope


@triton.jit
def backward_kernel(
    grad,
    value,
    attention,
    gate,
    dvalue,
    dattention,
    partial,
    key_mask,
    segment_ids,
    columns,
    heads,
    table,
    splits,
    entering,
    sizes,
    SHAPE: tl.constexpr,
):
    """The gradients of `forward_kernel`: a walk over dOut from the right to the left.

    Where, in addition to the parameters of `forward_kernel`:
        grad: dOut, of the shape of the output.
        dvalue: a tensor [B, H, S, D], of every head.
        dattention: a tensor [B, H', T, D]; if mixed.
        partial: per program ⟨dOut, P V − attention⟩ and the real and imaginary part of Σ ∂z^k/∂decay c_k, where c_k
            is how dOut and V correlate at lag k: [columns, B · blocks · splits, 3].
        splits: of dOut.
        entering: [B, blocks, H, slots, 4, BLOCK].
    """
    BLOCK: tl.constexpr = SHAPE.block
    CHUNK: tl.constexpr = SHAPE.chunk
    rows, num_columns, num_heads, length, offset, queries, heads_per_value, slots = sizes
    head, index, row, block, column, channels, table, axis, part = _program(
        columns, heads, table, segment_ids, rows, num_columns, length, SHAPE
    )
    split, _per_split, first, last = part
    dout = _of_head(grad, row, index)
    v_rows = _of_head(value, row, index // heads_per_value)
    dv_rows = _of_head(dvalue, row, index)
    mask, mask_stride = key_mask
    mask += row * mask_stride
    high, low = _halves(_toeplitz(table, WRITE, SHAPE), dout[0].dtype.element_ty, SHAPE)
    weight = 1.0
    if SHAPE.mixed:
        softmax = _of_head(attention, row, index)
        dsoftmax = _of_head(dattention, row, index)
        weight = _load_of_head(gate, head).to(tl.float32)

    if not SHAPE.causal:
        entering = _entering_of(entering, row, block, head, num_heads, slots, length, axis, SHAPE, 4)
        _walk_from_right(splits, dout, offset, queries, mask, axis, part, table, entering, channels, SHAPE, True)
    state = _states_of_split(splits, axis, table, part, SHAPE, True, FROM_RIGHT=False)
    zero = tl.zeros([BLOCK], tl.float32)
    sums = (zero, zero, zero)
    inner = tl.zeros([CHUNK, CHUNK], tl.float32)
    i = tl.arange(0, CHUNK)
    writing = _writing(table, CHUNK - 1 - i, SHAPE, True)
    from_left = _reading(table, i + 1, SHAPE, True)
    from_right = _reading(table, CHUNK - i, SHAPE, True)
    for number in tl.range(0, last - first, num_stages=SHAPE.stages):
        chunk = first + number
        position, inside = _positions(chunk, axis, SHAPE, True)
        query = position - offset
        asked = inside & (query >= 0) & (query < queries)
        seen = _seen(mask, position, inside, SHAPE)
        x = _load_rows(dout, query, asked, channels, SHAPE)
        v = _load_rows(v_rows, position, seen, channels, SHAPE)
        wide = v.to(tl.float32)
        if SHAPE.mixed:
            unmixed = _load_rows(softmax, query, asked, channels, SHAPE).to(tl.float32)
            product, slope, imaginary_slope = sums
            sums = (product - tl.sum(x.to(tl.float32) * unmixed, axis=0), slope, imaginary_slope)
            _store_rows(dsoftmax, query, asked, channels, (1.0 - weight) * x.to(tl.float32), SHAPE)

        acc = tl.zeros([CHUNK, BLOCK], tl.float32)
        if SHAPE.packed:
            own = tl.load(axis[0] + position, mask=inside, other=-1)
            same = own[:, None] == own[None, :]
            acc = _multiply(tl.where(same, high, 0.0), tl.where(same, low, 0.0), x, acc, SHAPE)
            of_chunk = _inner_products(v, x, tl.zeros([CHUNK, CHUNK], tl.float32))
            inner += tl.where(same, of_chunk, 0.0)
        else:
            acc = _multiply(high, low, x, acc, SHAPE)
            inner = _inner_products(v, x, inner)
        if not SHAPE.causal:
            reached, taken, keep = _borders(chunk, axis, SHAPE, True, True)
            pointers, has_place = _place_of_state(entering, chunk, axis, SHAPE, True)
            other = _load_states(pointers, has_place, SHAPE, True)
            acc = _add_readout(acc, other, from_right, reached)
            sums = _add_slope_of_readout(sums, wide, other, from_right, reached)
        reached, taken, keep = _borders(chunk, axis, SHAPE, True, False)
        acc = _add_readout(acc, state, from_left, reached)
        sums = _add_slope_of_readout(sums, wide, state, from_left, reached)
        state = _advance(state, x.to(tl.float32), writing, taken, keep, True)
        # Hidden keys get no gradient, and it has to be written.
        _store_rows(dv_rows, position, inside, channels, tl.where(seen[:, None], weight * acc, 0.0), SHAPE)

    weights, slopes = _toeplitz(table, WRITE, SHAPE), _toeplitz(table, DWRITE, SHAPE)
    imaginary_slopes = _toeplitz(table, DWRITE + 1, SHAPE)
    part_of_column = (row * SHAPE.blocks + block) * SHAPE.splits + split
    into = partial + (column.to(tl.int64) * (rows * SHAPE.blocks * SHAPE.splits) + part_of_column) * 3
    product, slope, imaginary_slope = sums
    tl.store(into, tl.sum(product) + tl.sum(tl.sum(weights * inner, axis=0)))
    tl.store(into + 1, tl.sum(slope) + tl.sum(tl.sum(slopes * inner, axis=0)))
    tl.store(into + 2, tl.sum(imaginary_slope) + tl.sum(tl.sum(imaginary_slopes * inner, axis=0)))


@triton.jit
def rates_kernel(
    partial,
    decay,
    gate,
    heads,
    starts,
    ddecay,
    dtheta,
    dgate,
    parts,
    MIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the rates and the gate of each head, from the parts of its programs, added up in a fixed order.

    Where:
        partial: of `backward_kernel`.
        decay, gate: (H,), as (pointer, stride).
        starts: where the columns of each head begin, and where the last ones end, (H + 1,).
        ddecay, dtheta, dgate: (H,).
        parts: programs of a column.
    """
    head = tl.program_id(0)
    begin = tl.load(starts + head).to(tl.int64) * parts
    end = tl.load(starts + head + 1).to(tl.int64) * parts
    product = tl.zeros([BLOCK], tl.float64)
    slope = tl.zeros([BLOCK], tl.float64)
    imaginary_slope = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < end
        product += tl.load(partial + 3 * place, mask=there, other=0.0)
        slope += tl.load(partial + 3 * place + 1, mask=there, other=0.0)
        imaginary_slope += tl.load(partial + 3 * place + 2, mask=there, other=0.0)
    weight = 1.0
    if MIXED:
        weight = _load_of_head(gate, head).to(tl.float64)
        tl.store(dgate + head, tl.sum(product))
    tl.store(ddecay + head, weight * tl.sum(slope))
    # ∂z^k/∂θ = i · decay · ∂z^k/∂decay; a regular head has no θ.
    rho = _load_of_head(decay, head).to(tl.float64)
    turned = -weight * rho * tl.sum(imaginary_slope)
    tl.store(dtheta + head, tl.where(tl.load(heads + 3 * head + 1) > 0, turned, 0.0))
