"""Where the steps of a sequence lie, and how states are carried along them.

Several values that belong together are tuples:

    tensor      (pointer, stride of rows of the batch, of heads, of positions)
    x           (pointer, stride of positions), of one row and head
    axis        (document_ids, steps, residue, d): the sub-sequence of a program, and the documents of its row
    part        (split, steps per split, first chunk, one past the last): what a program does of it
    state       (h_real, h_imaginary, q_real, q_imaginary), [BLOCK] each: h and, with BACKWARD, q = ∂h/∂decay

A walk is over V, or, with BACKWARD, over dOut, and then counts steps from the end of the key axis.
"""

import triton
import triton.language as tl

from rsa_hf.ops.triton.tables import (
    DILATION,
    DZ,
    INDEX,
    READ,
    REST,
    TABLE_ROWS,
    Z,
    _entry,
    _of_row,
    _steps_of_split,
)


@triton.jit
def _program(columns, heads, table, document_ids, rows, num_columns, length, SHAPE: tl.constexpr):
    """What this program owns.

    Returns:
        Head, its index in the layer, row of the batch, channel block, column, the channels, the head's table, its
        axis, its part.
    """
    program = tl.program_id(0)
    block = program % SHAPE.blocks
    column = (program // SHAPE.blocks) % num_columns
    row = (program // (SHAPE.blocks * num_columns)) % rows
    row = row.to(tl.int64)
    split = program // (SHAPE.blocks * num_columns * rows)
    head, residue = tl.load(columns + 2 * column), tl.load(columns + 2 * column + 1)
    d, index = _of_row(heads, head, DILATION), _of_row(heads, head, INDEX)
    steps = tl.cdiv(length - residue, d)
    per_split = _steps_of_split(length, d, SHAPE)
    first = split * (per_split // SHAPE.chunk)
    last = tl.minimum(first + per_split // SHAPE.chunk, tl.cdiv(steps, SHAPE.chunk))
    channels = block * SHAPE.block + tl.arange(0, SHAPE.block)
    ids, ids_stride = document_ids
    axis = (ids + row * ids_stride, steps, residue, d)
    table += head * TABLE_ROWS * SHAPE.powers
    return head, index, row, block, column, channels, table, axis, (split, per_split, first, last)


@triton.jit
def _of_head(tensor, row, head):
    """One row and head of a tensor."""
    pointer, of_row, of_head, of_position = tensor
    return pointer + row * of_row + head.to(tl.int64) * of_head, of_position


@triton.jit
def _position(step, axis, BACKWARD: tl.constexpr):
    """Place on the key axis of one step, or of several."""
    _document_ids, steps, residue, d = axis
    step = steps - 1 - step if BACKWARD else step
    return residue + step.to(tl.int64) * d


@triton.jit
def _positions(chunk, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """Places on the key axis of the steps of a chunk, and which of them there are."""
    step = chunk * SHAPE.chunk + tl.arange(0, SHAPE.chunk)
    return _position(step, axis, BACKWARD), step < axis[1]


@triton.jit
def _load_rows(x, place, kept, channels, SHAPE: tl.constexpr):
    """Rows [C, BLOCK] of a tensor; 0 where they are not kept or beyond the head's size."""
    base, stride = x
    pointers = base + (place * stride)[:, None] + channels[None, :]
    if SHAPE.head_size % SHAPE.block == 0:
        rows = tl.load(pointers, mask=kept[:, None], other=0.0)
    else:
        rows = tl.load(pointers, mask=kept[:, None] & (channels < SHAPE.head_size)[None, :], other=0.0)
    return rows


@triton.jit
def _store_rows(x, place, kept, channels, rows, SHAPE: tl.constexpr):
    base, stride = x
    pointers = base + (place * stride)[:, None] + channels[None, :]
    rows = rows.to(base.dtype.element_ty)
    if SHAPE.head_size % SHAPE.block == 0:
        tl.store(pointers, rows, mask=kept[:, None])
    else:
        tl.store(pointers, rows, mask=kept[:, None] & (channels < SHAPE.head_size)[None, :])


@triton.jit
def _load_row(x, step, shift, count, key_mask, axis, channels, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """One step of a walk, [BLOCK] in float32; 0 where there is none, or where, on a walk over V, its key is hidden."""
    base, stride = x
    place = _position(step, axis, BACKWARD)
    row = place - shift
    there = (step >= 0) & (step < axis[1]) & (row >= 0) & (row < count)
    if SHAPE.masked and not BACKWARD:
        there = there & (tl.load(key_mask + place, mask=there, other=0) != 0)
    pointers = base + row * stride + channels
    return tl.load(pointers, mask=there & (channels < SHAPE.head_size), other=0.0).to(tl.float32)


@triton.jit
def _seen(key_mask, place, inside, SHAPE: tl.constexpr):
    """Which keys of a chunk take part."""
    if SHAPE.masked:
        inside = inside & (tl.load(key_mask + place, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _document(step, axis, BACKWARD: tl.constexpr):
    """The document of a step, −1 outside the sequence."""
    document_ids, steps, _residue, _d = axis
    there = (step >= 0) & (step < steps)
    return tl.load(document_ids + _position(step, axis, BACKWARD), mask=there, other=-1)


@triton.jit
def _writing(table, exponents, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """What `_advance` needs of the table, read once before a loop: a loop that writes reads it anew every time.

    Returns:
        The weights z^k and ∂z^k/∂decay of rows, [C], then z^C, what float32 leaves of it, and ∂z^C/∂decay; each as
        (real, imaginary).
    """
    real, imaginary = _entry(table, Z, exponents, SHAPE)
    slope, imaginary_slope = real, imaginary
    if BACKWARD:
        slope, imaginary_slope = _entry(table, DZ, exponents, SHAPE)
    z_real, z_imaginary = _entry(table, Z, SHAPE.chunk, SHAPE)
    rest, imaginary_rest = _entry(table, REST, SHAPE.chunk, SHAPE)
    d_real, d_imaginary = _entry(table, DZ, SHAPE.chunk, SHAPE)
    return real, imaginary, slope, imaginary_slope, z_real, z_imaginary, rest, imaginary_rest, d_real, d_imaginary


@triton.jit
def _reading(table, exponents, SHAPE: tl.constexpr):
    """What reading a state needs of the table: c z^k of rows, as (real, imaginary), [C] each."""
    return _entry(table, READ, exponents, SHAPE)


@triton.jit
def _step_on(h_real, h_imaginary, real, imaginary, rest, imaginary_rest):
    """z^C h, with z^C to twice float32's digits: rounded once, it would be multiplied on at every chunk."""
    moved = real * h_real - imaginary * h_imaginary
    imaginary_moved = real * h_imaginary + imaginary * h_real
    moved += rest * h_real - imaginary_rest * h_imaginary
    imaginary_moved += rest * h_imaginary + imaginary_rest * h_real
    return moved, imaginary_moved


@triton.jit
def _sums(x, real, imaginary):
    """Σ_j w_j x_j over the rows of a tile, for complex weights: (real, imaginary), [BLOCK] each."""
    return tl.sum(x * real[:, None], axis=0), tl.sum(x * imaginary[:, None], axis=0)


@triton.jit
def _advance(state, x, writing, taken, keep, BACKWARD: tl.constexpr):
    """The state on the other side of a chunk, from its rows.

    Where:
        x: the rows, [C, BLOCK] float32.
        writing: of `_writing`, with the steps from each row to that side as exponents.
        taken: 1 where a row belongs to the document on the other side, [C].
        keep: 1 where the state does.
    """
    h_real, h_imaginary, q_real, q_imaginary = state
    real, imaginary, slope, imaginary_slope, z_real, z_imaginary, rest, imaginary_rest, d_real, d_imaginary = writing
    written, imaginary_written = _sums(x, real * taken, imaginary * taken)
    moved, imaginary_moved = _step_on(h_real, h_imaginary, z_real, z_imaginary, rest, imaginary_rest)
    if BACKWARD:
        q_moved, q_imaginary_moved = _step_on(q_real, q_imaginary, z_real, z_imaginary, rest, imaginary_rest)
        q_moved += d_real * h_real - d_imaginary * h_imaginary
        q_imaginary_moved += d_real * h_imaginary + d_imaginary * h_real
        q_written, q_imaginary_written = _sums(x, slope * taken, imaginary_slope * taken)
        q_real, q_imaginary = keep * q_moved + q_written, keep * q_imaginary_moved + q_imaginary_written
    return keep * moved + written, keep * imaginary_moved + imaginary_written, q_real, q_imaginary


@triton.jit
def _borders(chunk, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr, FROM_RIGHT: tl.constexpr):
    """Where documents let a state pass: which rows it reaches, which rows write into it, and whether it goes on."""
    reached, taken, keep = 1.0, 1.0, 1.0
    if SHAPE.packed:
        own = _document(chunk * SHAPE.chunk + tl.arange(0, SHAPE.chunk), axis, BACKWARD)
        first, last = chunk * SHAPE.chunk, (chunk + 1) * SHAPE.chunk - 1
        if FROM_RIGHT:
            before, after = _document(last + 1, axis, BACKWARD), _document(first, axis, BACKWARD)
        else:
            before, after = _document(first - 1, axis, BACKWARD), _document(last, axis, BACKWARD)
        reached, taken = (own == before).to(tl.float32), (own == after).to(tl.float32)
        keep = (before == after).to(tl.float32)
    return reached, taken, keep


@triton.jit
def _place_of_state(entering, chunk, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """Where the state that enters a chunk from the right is kept; nothing enters the last one, which has no place."""
    BLOCK: tl.constexpr = SHAPE.block
    states: tl.constexpr = 4 if BACKWARD else 2
    pointers = entering + chunk.to(tl.int64) * (states * BLOCK) + tl.arange(0, BLOCK)
    return pointers, (chunk + 1) * SHAPE.chunk < axis[1] + tl.zeros([BLOCK], tl.int32)


@triton.jit
def _load_states(pointers, mask, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    h_real = tl.load(pointers, mask=mask, other=0.0)
    h_imaginary = tl.load(pointers + SHAPE.block, mask=mask, other=0.0)
    q_real, q_imaginary = h_real, h_imaginary
    if BACKWARD:
        q_real = tl.load(pointers + 2 * SHAPE.block, mask=mask, other=0.0)
        q_imaginary = tl.load(pointers + 3 * SHAPE.block, mask=mask, other=0.0)
    return h_real, h_imaginary, q_real, q_imaginary


@triton.jit
def _store_states(pointers, state, mask, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    h_real, h_imaginary, q_real, q_imaginary = state
    tl.store(pointers, h_real, mask=mask)
    tl.store(pointers + SHAPE.block, h_imaginary, mask=mask)
    if BACKWARD:
        tl.store(pointers + 2 * SHAPE.block, q_real, mask=mask)
        tl.store(pointers + 3 * SHAPE.block, q_imaginary, mask=mask)


@triton.jit
def _walk(
    state,
    x,
    shift,
    count,
    key_mask,
    axis,
    table,
    entering,
    channels,
    first,
    last,
    SHAPE: tl.constexpr,
    BACKWARD: tl.constexpr,
    FROM_RIGHT: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Carry the state over the chunks `first` … `last` − 1, from the left or from the right.

    Where:
        state: the state that enters.
        x: a row and head of V or of dOut.
        shift, count: rows of x are the positions `shift` … `shift` + `count` − 1.
        entering: with KEPT, where the states that enter each chunk go, [chunks, 2 or 4, BLOCK].

    Returns:
        The state that leaves.
    """
    i = tl.arange(0, SHAPE.chunk)
    exponents = i if FROM_RIGHT else SHAPE.chunk - 1 - i
    writing = _writing(table, exponents, SHAPE, BACKWARD)
    for number in tl.range(0, last - first, num_stages=SHAPE.stages):
        chunk = last - 1 - number if FROM_RIGHT else first + number
        position, inside = _positions(chunk, axis, SHAPE, BACKWARD)
        place = position - shift
        kept = inside & (place >= 0) & (place < count)
        if not BACKWARD:
            kept = _seen(key_mask, position, kept, SHAPE)
        tile = _load_rows(x, place, kept, channels, SHAPE).to(tl.float32)
        if KEPT:
            pointers, has_place = _place_of_state(entering, chunk, axis, SHAPE, BACKWARD)
            _store_states(pointers, state, has_place, SHAPE, BACKWARD)
        _reached, taken, keep = _borders(chunk, axis, SHAPE, BACKWARD, FROM_RIGHT)
        state = _advance(state, tile, writing, taken, keep, BACKWARD)
    return state


@triton.jit
def _walk_from_right(
    splits,
    x,
    shift,
    count,
    key_mask,
    axis,
    part,
    table,
    entering,
    channels,
    SHAPE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Leave the states that enter the chunks of a part from the right in memory."""
    state = _states_of_split(splits, axis, table, part, SHAPE, BACKWARD, True)
    _split, _per_split, first, last = part
    _walk(
        state,
        x,
        shift,
        count,
        key_mask,
        axis,
        table,
        entering,
        channels,
        first,
        last,
        SHAPE,
        BACKWARD,
        FROM_RIGHT=True,
        KEPT=True,
    )
    # Other threads read what these have written.
    tl.debug_barrier()


@triton.jit
def _states_of_split(
    splits,
    axis,
    table,
    part,
    SHAPE: tl.constexpr,
    BACKWARD: tl.constexpr,
    FROM_RIGHT: tl.constexpr,
):
    """The state that enters a split: what all splits on that side write, each weighted with z^{L k}."""
    BLOCK: tl.constexpr = SHAPE.block
    split, per_split, _first, _last = part
    h, h_of_imaginary = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    q, q_of_imaginary = h, h_of_imaginary
    if SHAPE.splits > 1:
        # The programs of the splits of one column are `apart`.
        apart = tl.num_programs(0).to(tl.int64) // SHAPE.splits
        splits += (tl.program_id(0) - split * apart) * (8 * BLOCK)
        m = tl.arange(0, SHAPE.splits)
        if FROM_RIGHT:
            between = m - split - 1
            edge, own = (split + 1) * per_split, m * per_split
            splits += 4 * BLOCK
        else:
            between = split - 1 - m
            edge, own = split * per_split - 1, (m + 1) * per_split - 1
        used = (between >= 0) & (m * per_split < axis[1])
        if SHAPE.packed:
            used = used & (_document(own, axis, BACKWARD) == _document(edge, axis, BACKWARD))
        exponent = SHAPE.chunk + 1 + tl.where(used, between, 0)
        stride = apart * (8 * BLOCK)
        pointers = splits + (m.to(tl.int64) * stride)[:, None] + tl.arange(0, BLOCK)[None, :]
        h_real, h_imaginary, q_real, q_imaginary = _load_states(pointers, used[:, None], SHAPE, BACKWARD)
        real, imaginary = _entry(table, Z, exponent, SHAPE)
        real, imaginary = real[:, None], imaginary[:, None]
        h = tl.sum(real * h_real - imaginary * h_imaginary, axis=0)
        h_of_imaginary = tl.sum(real * h_imaginary + imaginary * h_real, axis=0)
        if BACKWARD:
            slope, imaginary_slope = _entry(table, DZ, exponent, SHAPE)
            slope, imaginary_slope = slope[:, None], imaginary_slope[:, None]
            q_real, q_imaginary = real * q_real - imaginary * q_imaginary, real * q_imaginary + imaginary * q_real
            q = tl.sum(q_real + slope * h_real - imaginary_slope * h_imaginary, axis=0)
            q_of_imaginary = tl.sum(q_imaginary + slope * h_imaginary + imaginary_slope * h_real, axis=0)
    return h, h_of_imaginary, q, q_of_imaginary


@triton.jit
def splits_kernel(
    x,
    key_mask,
    document_ids,
    columns,
    heads,
    table,
    splits,
    sizes,
    SHAPE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """What each split of V, or of dOut, writes into the states on either side: [programs, 2 sides, 4, BLOCK].

    Where:
        x: V or dOut, a tensor.
        sizes: rows of the batch, columns, keys to read, position of the first row of x, number of them, and heads that
            share a head of x.
    """
    BLOCK: tl.constexpr = SHAPE.block
    rows, num_columns, length, shift, count, num_key_value_groups = sizes
    _head, index, row, _block, _column, channels, table, axis, part = _program(
        columns, heads, table, document_ids, rows, num_columns, length, SHAPE
    )
    _split, _per_split, first, last = part
    x_rows = _of_head(x, row, index // num_key_value_groups)
    mask, mask_stride = key_mask
    into = splits + tl.program_id(0).to(tl.int64) * (8 * BLOCK) + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    for side in tl.static_range(1 if SHAPE.causal else 2):
        state = _walk(
            (zero, zero, zero, zero),
            x_rows,
            shift,
            count,
            mask + row * mask_stride,
            axis,
            table,
            splits,
            channels,
            first,
            last,
            SHAPE,
            BACKWARD,
            FROM_RIGHT=side == 1,
            KEPT=False,
        )
        _store_states(into + 4 * side * BLOCK, state, None, SHAPE, BACKWARD)
