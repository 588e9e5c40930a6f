"""The gradients of `forward_kernel`, in one walk over dOut, V and attention."""

import triton
import triton.language as tl

from rsa_hf.ops.triton.forward import _add_readout
from rsa_hf.ops.triton.states import (
    _advance,
    _borders,
    _load_rows,
    _load_states,
    _positions,
    _program,
    _reading,
    _seen,
    _states_of_split,
    _store_rows,
    _sums,
    _walk,
    _writing,
)
from rsa_hf.ops.triton.tables import (
    DWRITE,
    TABLE_ROWS,
    WRITE,
    _multiply,
    _split,
    _steps_of_split,
    _toeplitz,
)


@triton.jit
def _inner_products(v, x, acc):
    """Add v xᵀ, [C, C], with no operand rounded."""
    if v.dtype != x.dtype:
        v, x = v.to(tl.float32), x.to(tl.float32)
    return tl.dot(v, tl.trans(x), acc, input_precision="tf32x3")


@triton.jit
def _slope_of_readout(v, h_real, h_imaginary, q_real, q_imaginary, reading, reached):
    """⟨v, Re(z^k h)⟩ and its complex derivative, channel by channel: [BLOCK] each."""
    real, imaginary, slope, imaginary_slope = reading
    p, p_imaginary = _sums(v, real * reached, imaginary * reached)
    s, s_imaginary = _sums(v, slope * reached, imaginary_slope * reached)
    product = p * h_real - p_imaginary * h_imaginary
    change = s * h_real - s_imaginary * h_imaginary + p * q_real - p_imaginary * q_imaginary
    imaginary_change = s * h_imaginary + s_imaginary * h_real + p * q_imaginary + p_imaginary * q_real
    return product, change, imaginary_change


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
    rows,
    num_columns,
    num_heads,
    length,
    offset,
    queries,
    heads_per_value,
    grad_b,
    grad_h,
    grad_t,
    value_b,
    value_h,
    value_s,
    attention_b,
    attention_h,
    attention_t,
    dvalue_b,
    dvalue_h,
    dvalue_s,
    dattention_b,
    dattention_h,
    dattention_t,
    gate_stride,
    mask_b,
    segments_b,
    slots,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    POWERS: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    MIXED: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The gradients of `forward_kernel`: a walk over dOut from the right to the left.

    Where, beside what is said of `forward_kernel`:
        grad: dOut, of the shape of the output.
        dvalue: [B, H, S, D], of every head.
        dattention: [B, T, H', D]; with MIXED.
        partial: per program ⟨dOut, P V − attention⟩ and the real and imaginary part of Σ ∂z^k/∂decay c_k, where c_k
            is how dOut and V correlate at lag k: [columns, B · BLOCKS · SPLITS, 3].
        splits: of dOut.
        entering: [B, BLOCKS, H, slots, 4, BLOCK].
    """
    head, residue, row, block, split, column = _program(columns, num_columns, rows, BLOCKS)
    d = tl.load(heads + 2 * head)
    table += head * TABLE_ROWS * POWERS
    steps = tl.cdiv(length - residue, d)
    per_split = _steps_of_split(length, d, CHUNK, SPLITS)
    first = split * (per_split // CHUNK)
    last = tl.minimum(first + per_split // CHUNK, tl.cdiv(steps, CHUNK))
    channels = block * BLOCK + tl.arange(0, BLOCK)
    grad += row * grad_b + head.to(tl.int64) * grad_h
    value += row * value_b + (head // heads_per_value).to(tl.int64) * value_h
    dvalue += row * dvalue_b + head.to(tl.int64) * dvalue_h
    key_mask += row * mask_b
    segment_ids += row * segments_b
    i = tl.arange(0, CHUNK)
    high = _toeplitz(table, WRITE, CHUNK, CAUSAL, POWERS)
    low = high
    if SPLIT:
        high, low = _split(high, grad.dtype.element_ty)
    weight = 1.0
    if MIXED:
        attention += row * attention_b + head.to(tl.int64) * attention_h
        dattention += row * dattention_b + head.to(tl.int64) * dattention_h
        weight = tl.load(gate + head * gate_stride).to(tl.float32)

    apart = tl.num_programs(0).to(tl.int64) // SPLITS
    splits += (tl.program_id(0) - split * apart) * (8 * BLOCK)
    stride = apart * (8 * BLOCK)
    if not CAUSAL:
        slot = ((row * BLOCKS + block) * num_heads + head) * slots
        entering += (slot + residue * (tl.cdiv(tl.cdiv(length, d), CHUNK) - 1)) * (4 * BLOCK)
        h_real, h_imaginary, q_real, q_imaginary = _states_of_split(
            splits,
            segment_ids,
            table,
            split,
            stride,
            steps,
            per_split,
            residue,
            d,
            BLOCK,
            CHUNK,
            SPLITS,
            POWERS,
            True,
            PACKED,
            True,
            FROM_RIGHT=True,
        )
        _walk(
            h_real,
            h_imaginary,
            q_real,
            q_imaginary,
            grad,
            grad_t,
            offset,
            queries,
            key_mask,
            segment_ids,
            table,
            entering,
            channels,
            first,
            last,
            steps,
            residue,
            d,
            D,
            BLOCK,
            CHUNK,
            POWERS,
            STAGES,
            True,
            False,
            PACKED,
            True,
            FROM_RIGHT=True,
            KEPT=True,
        )
        # Other threads read what these have written.
        tl.debug_barrier()
    h_real, h_imaginary, q_real, q_imaginary = _states_of_split(
        splits,
        segment_ids,
        table,
        split,
        stride,
        steps,
        per_split,
        residue,
        d,
        BLOCK,
        CHUNK,
        SPLITS,
        POWERS,
        True,
        PACKED,
        True,
        FROM_RIGHT=False,
    )
    product = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    imaginary_slope = tl.zeros([BLOCK], tl.float32)
    inner = tl.zeros([CHUNK, CHUNK], tl.float32)
    writing = _writing(table, CHUNK - 1 - i, CHUNK, True, POWERS)
    from_left = _reading(table, i + 1, True, POWERS)
    from_right = _reading(table, CHUNK - i, True, POWERS)
    for number in tl.range(0, last - first, num_stages=STAGES):
        chunk = first + number
        position, inside = _positions(chunk, steps, residue, d, CHUNK, True)
        query = position - offset
        asked = inside & (query >= 0) & (query < queries)
        seen = _seen(key_mask, position, inside, MASKED)
        x = _load_rows(grad, query, grad_t, asked, channels, D, BLOCK)
        v = _load_rows(value, position, value_s, seen, channels, D, BLOCK)
        wide = v.to(tl.float32)
        if MIXED:
            softmax = _load_rows(attention, query, attention_t, asked, channels, D, BLOCK).to(tl.float32)
            product -= tl.sum(x.to(tl.float32) * softmax, axis=0)
            dsoftmax = (1.0 - weight) * x.to(tl.float32)
            _store_rows(dattention, query, dattention_t, asked, channels, dsoftmax, D, BLOCK)

        acc = tl.zeros([CHUNK, BLOCK], tl.float32)
        if PACKED:
            own = tl.load(segment_ids + position, mask=inside, other=-1)
            same = own[:, None] == own[None, :]
            acc = _multiply(tl.where(same, high, 0.0), tl.where(same, low, 0.0), x, acc, SPLIT)
            inner += tl.where(same, _inner_products(v, x, tl.zeros([CHUNK, CHUNK], tl.float32)), 0.0)
        else:
            acc = _multiply(high, low, x, acc, SPLIT)
            inner = _inner_products(v, x, inner)
        if not CAUSAL:
            reached, taken, keep = _borders(segment_ids, chunk, steps, residue, d, CHUNK, True, PACKED, True)
            pointers = entering + chunk.to(tl.int64) * (4 * BLOCK) + tl.arange(0, BLOCK)
            has_place = (chunk + 1) * CHUNK < steps + tl.zeros([BLOCK], tl.int32)
            b_real, b_imaginary, e_real, e_imaginary = _load_states(pointers, has_place, BLOCK, True)
            acc = _add_readout(acc, b_real, b_imaginary, from_right, reached)
            more, more_slope, more_imaginary = _slope_of_readout(
                wide, b_real, b_imaginary, e_real, e_imaginary, from_right, reached
            )
            product += more
            slope += more_slope
            imaginary_slope += more_imaginary
        reached, taken, keep = _borders(segment_ids, chunk, steps, residue, d, CHUNK, True, PACKED, False)
        acc = _add_readout(acc, h_real, h_imaginary, from_left, reached)
        more, more_slope, more_imaginary = _slope_of_readout(
            wide, h_real, h_imaginary, q_real, q_imaginary, from_left, reached
        )
        product += more
        slope += more_slope
        imaginary_slope += more_imaginary
        h_real, h_imaginary, q_real, q_imaginary = _advance(
            h_real,
            h_imaginary,
            q_real,
            q_imaginary,
            x.to(tl.float32),
            writing,
            taken,
            keep,
            True,
        )
        # Hidden keys get no gradient, and it has to be written.
        dv = tl.where(seen[:, None], weight * acc, 0.0)
        _store_rows(dvalue, position, dvalue_s, inside, channels, dv, D, BLOCK)

    weights = _toeplitz(table, WRITE, CHUNK, CAUSAL, POWERS)
    slopes = _toeplitz(table, DWRITE, CHUNK, CAUSAL, POWERS)
    imaginary_slopes = _toeplitz(table, DWRITE + 1, CHUNK, CAUSAL, POWERS)
    part = (row * BLOCKS + block) * SPLITS + split
    into = partial + (column.to(tl.int64) * (rows * BLOCKS * SPLITS) + part) * 3
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
    decay_stride,
    gate_stride,
    MIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the rates and the gate of each head, from the parts of its programs, added up in a fixed order.

    Where:
        partial: of `backward_kernel`.
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
        weight = tl.load(gate + head * gate_stride).to(tl.float64)
        tl.store(dgate + head, tl.sum(product))
    tl.store(ddecay + head, weight * tl.sum(slope))
    # ∂z^k/∂θ = i · decay · ∂z^k/∂decay; a regular head has no θ.
    rho = tl.load(decay + head * decay_stride).to(tl.float64)
    turned = -weight * rho * tl.sum(imaginary_slope)
    tl.store(dtheta + head, tl.where(tl.load(heads + 2 * head + 1) > 0, turned, 0.0))
