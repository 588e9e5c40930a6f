"""Where the steps of a sequence lie, and how states are carried along them.

Several values that belong together are tuples:

    tensor      (pointer, stride of rows of the batch, of heads, of positions)
    x           (pointer, stride of positions), of one row and head
    part        (split, steps per split, first chunk, one past the last): the part of its axis that a program walks
    state       (h, q), complex, [BLOCK] each: h and, with BACKWARD, q = ∂h/∂decay

A complex number is (real, imaginary). A walk is over V, or, with BACKWARD, over dOut; it then counts steps from the
end of the key axis.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rsa_hf.ops.triton import tables


class Axis(NamedTuple):
    """The sub-sequence that a program walks along, and what it reads on the way."""

    documents: Any  # the document of each position of its row; if packed
    mask: Any  # 0 where a key of its row is hidden; if masked
    steps: Any
    residue: Any
    d: Any
    shift: Any  # the rows of V or dOut that it walks along are the positions `shift` … `shift` + `count` − 1
    count: Any
    channels: Any  # [BLOCK]
    table: Any  # of its head
    steps_back: Any  # N, the most steps that a query sees; if windowed


@triton.jit
def program_of(shared, rows, num_columns, length, shift, count, farthest, SHAPE: tl.constexpr):
    """What this program owns: head, its index in the layer, row of the batch, channel block, column, axis, part."""
    key_mask, document_ids, columns, heads, table = shared
    program = tl.program_id(0)
    block = program % SHAPE.blocks
    column = (program // SHAPE.blocks) % num_columns
    row = (program // (SHAPE.blocks * num_columns)) % rows
    row = row.to(tl.int64)
    split = program // (SHAPE.blocks * num_columns * rows)
    head, residue = tl.load(columns + 2 * column), tl.load(columns + 2 * column + 1)
    d, index = tables.of_row(heads, head, tables.DILATION), tables.of_row(heads, head, tables.INDEX)
    steps = tl.cdiv(length - residue, d)
    per_split = tables.steps_of_split(length, d, SHAPE)
    first = split * (per_split // SHAPE.chunk)
    last = tl.minimum(first + per_split // SHAPE.chunk, tl.cdiv(steps, SHAPE.chunk))
    channels = block * SHAPE.block + tl.arange(0, SHAPE.block)
    table += head * tables.TABLE_ROWS * SHAPE.powers
    documents, mask = document_ids[0] + row * document_ids[1], key_mask[0] + row * key_mask[1]
    axis = Axis(documents, mask, steps, residue, d, shift, count, channels, table, farthest // d)
    return head, index, row, block, column, axis, (split, per_split, first, last)


@triton.jit
def rows_of_head(tensor, row, head):
    """One row and head of a tensor."""
    pointer, of_row, of_head, of_position = tensor
    return pointer + row * of_row + head.to(tl.int64) * of_head, of_position


@triton.jit
def _position(step, axis, BACKWARD: tl.constexpr):
    """Place on the key axis of one step, or of several."""
    step = axis.steps - 1 - step if BACKWARD else step
    return axis.residue + step.to(tl.int64) * axis.d


@triton.jit
def positions(chunk, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """Places on the key axis of the steps of a chunk, and which of them exist."""
    step = chunk * SHAPE.chunk + tl.arange(0, SHAPE.chunk)
    return _position(step, axis, BACKWARD), step < axis.steps


@triton.jit
def _rows(x, place, kept, channels, SHAPE: tl.constexpr):
    """Pointers to rows of a tensor, [C, BLOCK], and which of their numbers exist."""
    base, stride = x
    there = kept[:, None]
    if SHAPE.head_size % SHAPE.block != 0:
        there = there & (channels < SHAPE.head_size)[None, :]
    return base + (place * stride)[:, None] + channels[None, :], there


@triton.jit
def load_rows(x, place, kept, channels, SHAPE: tl.constexpr):
    """Rows [C, BLOCK] of a tensor; 0 where they are not kept or beyond the head's size."""
    pointers, there = _rows(x, place, kept, channels, SHAPE)
    return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def _load_steps(x, step, document, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """Steps of a walk, [C, BLOCK], as in `load_row`; also 0 where a document is given and they belong to another."""
    position = _position(step, axis, BACKWARD)
    place = position - axis.shift
    kept = (place >= 0) & (place < axis.count)
    if not BACKWARD:
        kept = seen(axis, position, kept, SHAPE)
    if document is not None:
        kept = kept & (tl.load(axis.documents + position, mask=kept, other=-1) == document)
    return load_rows(x, place, kept, axis.channels, SHAPE)


@triton.jit
def store_rows(x, place, kept, channels, rows, SHAPE: tl.constexpr):
    """Write rows, [C, BLOCK], in the dtype of x, where they are kept."""
    pointers, there = _rows(x, place, kept, channels, SHAPE)
    tl.store(pointers, rows.to(x[0].dtype.element_ty), mask=there)


@triton.jit
def load_row(x, step, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """One step of a walk, [BLOCK] in float32; 0 where there is none, or where, on a walk over V, its key is hidden."""
    base, stride = x
    place = _position(step, axis, BACKWARD)
    row = place - axis.shift
    there = (step >= 0) & (step < axis.steps) & (row >= 0) & (row < axis.count)
    if SHAPE.masked and not BACKWARD:
        there = there & (tl.load(axis.mask + place, mask=there, other=0) != 0)
    pointers = base + row * stride + axis.channels
    return tl.load(pointers, mask=there & (axis.channels < SHAPE.head_size), other=0.0).to(tl.float32)


@triton.jit
def seen(axis, place, inside, SHAPE: tl.constexpr):
    """Which keys of a chunk take part."""
    if SHAPE.masked:
        inside = inside & (tl.load(axis.mask + place, mask=inside, other=0) != 0)
    return inside


@triton.jit
def document_at(step, axis, BACKWARD: tl.constexpr):
    """The document of a step, −1 outside the sequence."""
    there = (step >= 0) & (step < axis.steps)
    return tl.load(axis.documents + _position(step, axis, BACKWARD), mask=there, other=-1)


@triton.jit
def powers_to_write(axis, exponents, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """What `advance` needs of the table, read once before a loop: a loop that writes would read it again every time.

    These are the weights z^k and ∂z^k/∂decay of rows, [C], then z^C, what float32 leaves of it, and ∂z^C/∂decay; and,
    with a window, z^{N + k} and its derivative, the weights that are subtracted for the rows that leave it.
    """
    z, C = tables.entry_at(axis.table, tables.Z, exponents, SHAPE), SHAPE.chunk
    slope = tables.entry_at(axis.table, tables.DZ, exponents, SHAPE) if BACKWARD else z
    whole, rest = tables.entry_at(axis.table, tables.Z, C, SHAPE), tables.entry_at(axis.table, tables.REST, C, SHAPE)
    far, far_slope = z, z
    if SHAPE.windowed:
        power, change = tables.at_window(axis.table, tables.Z, SHAPE), tables.at_window(axis.table, tables.DZ, SHAPE)
        far, far_slope = tables.times(power, z), tables.plus(tables.times(power, slope), tables.times(change, z))
    return z, slope, whole, rest, tables.entry_at(axis.table, tables.DZ, C, SHAPE), far, far_slope


@triton.jit
def sums(x, weights, reached):
    """Σ_j w_j x_j over the rows of a tile that are reached, for complex weights: [BLOCK]."""
    real, imaginary = weights[0] * reached, weights[1] * reached
    return tl.sum(x * real[:, None], axis=0), tl.sum(x * imaginary[:, None], axis=0)


@triton.jit
def _kept(state, keep, written):
    return keep * state[0] + written[0], keep * state[1] + written[1]


@triton.jit
def _written(x, weights, taken, leaving, far, keep):
    """What a chunk changes in the state on its other side: what its rows write, minus what leaves the window."""
    written = sums(x, weights, taken)
    if leaving is not None:
        leaving = leaving.to(tl.float32)
        real = x * (weights[0] * taken)[:, None] - leaving * (far[0] * keep)[:, None]
        imaginary = x * (weights[1] * taken)[:, None] - leaving * (far[1] * keep)[:, None]
        written = tl.sum(real, axis=0), tl.sum(imaginary, axis=0)
    return written


@triton.jit
def advance(state, x, leaving, writing, taken, keep, BACKWARD: tl.constexpr):
    """The state on the other side of a chunk, from its rows.

    z^C has twice float32's digits, because a rounding error would be multiplied in at every chunk.

    Where:
        x: the rows, [C, BLOCK] float32.
        leaving: from `load_leaving`, or None.
        writing: from `powers_to_write`, with the steps from each row to the other side as exponents.
        taken: 1 where a row belongs to the document on the other side, [C].
        keep: 1 if the state goes on to the other side.
    """
    h, q = state
    z, slope, whole, rest, change, far, far_slope = writing
    written = _written(x, z, taken, leaving, far, keep)
    moved = tables.plus(tables.times(whole, h), tables.times(rest, h))
    if BACKWARD:
        q_moved = tables.plus(tables.plus(tables.times(whole, q), tables.times(rest, q)), tables.times(change, h))
        q = _kept(q_moved, keep, _written(x, slope, taken, leaving, far_slope, keep))
    return _kept(moved, keep, written), q


@triton.jit
def load_leaving(x, chunk, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr, FROM_RIGHT: tl.constexpr):
    """The rows that leave the window along a chunk, [C, BLOCK]: the j-th is N steps beyond the chunk's j-th.

    Rows of other documents than that of the state that enters the chunk are 0.
    """
    first = chunk * SHAPE.chunk
    step = first + tl.arange(0, SHAPE.chunk) + (axis.steps_back if FROM_RIGHT else -axis.steps_back)
    document = None
    if SHAPE.packed:
        document = document_at(first + SHAPE.chunk if FROM_RIGHT else first - 1, axis, BACKWARD)
    return _load_steps(x, step, document, axis, SHAPE, BACKWARD)


@triton.jit
def borders(chunk, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr, FROM_RIGHT: tl.constexpr):
    """Where documents let a state pass: which rows it reaches, which rows write into it, and whether it goes on."""
    reached, taken, keep = 1.0, 1.0, 1.0
    if SHAPE.packed:
        own = document_at(chunk * SHAPE.chunk + tl.arange(0, SHAPE.chunk), axis, BACKWARD)
        first, last = chunk * SHAPE.chunk, (chunk + 1) * SHAPE.chunk - 1
        if FROM_RIGHT:
            before, after = document_at(last + 1, axis, BACKWARD), document_at(first, axis, BACKWARD)
        else:
            before, after = document_at(first - 1, axis, BACKWARD), document_at(last, axis, BACKWARD)
        reached, taken = (own == before).to(tl.float32), (own == after).to(tl.float32)
        keep = (before == after).to(tl.float32)
    if SHAPE.windowed:
        keep = tl.where(axis.steps_back > SHAPE.chunk, keep, 0.0)
    return reached, taken, keep


@triton.jit
def place_of_state(entering, chunk, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """Where the state that enters a chunk from the right is kept. None enters the last chunk, which has no place."""
    BLOCK: tl.constexpr = SHAPE.block
    states: tl.constexpr = 4 if BACKWARD else 2
    pointers = entering + chunk.to(tl.int64) * (states * BLOCK) + tl.arange(0, BLOCK)
    return pointers, (chunk + 1) * SHAPE.chunk < axis.steps + tl.zeros([BLOCK], tl.int32)


@triton.jit
def load_states(pointers, mask, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """A state that was stored, h and q; q is h if only h was."""
    h = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + SHAPE.block, mask=mask, other=0.0)
    q = h
    if BACKWARD:
        pointers += 2 * SHAPE.block
        q = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + SHAPE.block, mask=mask, other=0.0)
    return h, q


@triton.jit
def _store_states(pointers, state, mask, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    h, q = state
    tl.store(pointers, h[0], mask=mask)
    tl.store(pointers + SHAPE.block, h[1], mask=mask)
    if BACKWARD:
        tl.store(pointers + 2 * SHAPE.block, q[0], mask=mask)
        tl.store(pointers + 3 * SHAPE.block, q[1], mask=mask)


@triton.jit
def walk(state, x, axis, part, entering, SHAPE: tl.constexpr, BACKWARD: tl.constexpr, FROM_RIGHT: tl.constexpr):
    """Carry a state along a part of V or of dOut, from the left or from the right; return the state that leaves.

    `entering` is the memory for the states that enter each chunk, [chunks, 2 or 4, BLOCK], or None.
    """
    _split, _per_split, first, last = part
    i = tl.arange(0, SHAPE.chunk)
    writing = powers_to_write(axis, i if FROM_RIGHT else SHAPE.chunk - 1 - i, SHAPE, BACKWARD)
    for number in tl.range(0, last - first, num_stages=SHAPE.stages):
        chunk = last - 1 - number if FROM_RIGHT else first + number
        tile = _load_steps(x, chunk * SHAPE.chunk + i, None, axis, SHAPE, BACKWARD).to(tl.float32)
        if entering is not None:
            pointers, has_place = place_of_state(entering, chunk, axis, SHAPE, BACKWARD)
            _store_states(pointers, state, has_place, SHAPE, BACKWARD)
        _reached, taken, keep = borders(chunk, axis, SHAPE, BACKWARD, FROM_RIGHT)
        leaving = load_leaving(x, chunk, axis, SHAPE, BACKWARD, FROM_RIGHT) if SHAPE.windowed else None
        state = advance(state, tile, leaving, writing, taken, keep, BACKWARD)
    return state


@triton.jit
def walk_from_right(splits, x, axis, part, entering, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """Store the states that enter the chunks of a part from the right in memory."""
    state = states_of_split(splits, axis, part, SHAPE, BACKWARD, True)
    walk(state, x, axis, part, entering, SHAPE, BACKWARD, True)
    # Other threads read what these threads have written.
    tl.debug_barrier()


@triton.jit
def as_column(a):
    """A complex vector as a column."""
    return a[0][:, None], a[1][:, None]


@triton.jit
def total(a):
    """The sum of the rows of a complex matrix."""
    return tl.sum(a[0], axis=0), tl.sum(a[1], axis=0)


@triton.jit
def states_of_split(splits, axis, part, SHAPE: tl.constexpr, BACKWARD: tl.constexpr, FROM_RIGHT: tl.constexpr):
    """The state that enters a split: what all splits on that side write, each weighted with z^{L k}."""
    BLOCK: tl.constexpr = SHAPE.block
    split, per_split, _first, _last = part
    zero = tl.zeros([BLOCK], tl.float32)
    h, q = (zero, zero), (zero, zero)
    if SHAPE.splits > 1:
        # The distance between programs of neighbouring splits of one column.
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
        used = (between >= 0) & (m * per_split < axis.steps)
        if SHAPE.packed:
            used = used & (document_at(own, axis, BACKWARD) == document_at(edge, axis, BACKWARD))
        exponent = SHAPE.chunk + 1 + tl.where(used, between, 0)
        stride = apart * (8 * BLOCK)
        pointers = splits + (m.to(tl.int64) * stride)[:, None] + tl.arange(0, BLOCK)[None, :]
        written, change = load_states(pointers, used[:, None], SHAPE, BACKWARD)
        z = as_column(tables.entry_at(axis.table, tables.Z, exponent, SHAPE))
        h = total(tables.times(z, written))
        if BACKWARD:
            slope = as_column(tables.entry_at(axis.table, tables.DZ, exponent, SHAPE))
            q = total(tables.plus(tables.times(z, change), tables.times(slope, written)))
    return h, q


@triton.jit
def splits_kernel(x, shared, splits, sizes, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """What each split of V, or of dOut, writes into the states on either side: [programs, 2 sides, 4, BLOCK].

    Where:
        x: V or dOut, a tensor.
        sizes: rows of the batch, columns, keys to read, position of the first row of x, number of its rows, heads that
            share a head of x, and the longest lag that a window shows.
    """
    BLOCK: tl.constexpr = SHAPE.block
    rows, num_columns, length, shift, count, num_key_value_groups, farthest = sizes
    owned = program_of(shared, rows, num_columns, length, shift, count, farthest, SHAPE)
    _head, index, row, _block, _column, axis, part = owned
    x_rows = rows_of_head(x, row, index // num_key_value_groups)
    into = splits + tl.program_id(0).to(tl.int64) * (8 * BLOCK) + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    for side in tl.static_range(1 if SHAPE.causal else 2):
        state = ((zero, zero), (zero, zero))
        state = walk(state, x_rows, axis, part, None, SHAPE, BACKWARD, side == 1)
        _store_states(into + 4 * side * BLOCK, state, None, SHAPE, BACKWARD)
