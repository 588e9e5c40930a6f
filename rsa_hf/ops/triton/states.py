"""Where the steps of a sequence lie, and how states are carried along them."""

import triton
import triton.language as tl

from rsa_hf.ops.triton.tables import DWRITE, DZ, REST, TABLE_ROWS, WRITE, Z, _entry, _steps_of_split


@triton.jit
def _program(columns, num_columns, rows, BLOCKS: tl.constexpr):
    """Which head, residue, row of the batch, channel block and split this program owns."""
    program = tl.program_id(0)
    block = program % BLOCKS
    column = (program // BLOCKS) % num_columns
    row = (program // (BLOCKS * num_columns)) % rows
    split = program // (BLOCKS * num_columns * rows)
    return tl.load(columns + 2 * column), tl.load(columns + 2 * column + 1), row.to(tl.int64), block, split, column


@triton.jit
def _positions(chunk, steps, residue, d, CHUNK: tl.constexpr, REVERSED: tl.constexpr):
    """Places on the key axis of the steps of a chunk, and which of them there are."""
    step = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = step < steps
    step = steps - 1 - step if REVERSED else step
    return residue + step.to(tl.int64) * d, inside


@triton.jit
def _position(step, steps, residue, d, REVERSED: tl.constexpr):
    """Place on the key axis of one step, or of several."""
    step = steps - 1 - step if REVERSED else step
    return residue + step.to(tl.int64) * d


@triton.jit
def _load_rows(base, place, stride, kept, channels, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [C, BLOCK] of a tensor; 0 where they are not kept or beyond the head's size."""
    pointers = base + (place * stride)[:, None] + channels[None, :]
    if D % BLOCK == 0:
        rows = tl.load(pointers, mask=kept[:, None], other=0.0)
    else:
        rows = tl.load(pointers, mask=kept[:, None] & (channels < D)[None, :], other=0.0)
    return rows


@triton.jit
def _store_rows(base, place, stride, kept, channels, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    pointers = base + (place * stride)[:, None] + channels[None, :]
    rows = rows.to(base.dtype.element_ty)
    if D % BLOCK == 0:
        tl.store(pointers, rows, mask=kept[:, None])
    else:
        tl.store(pointers, rows, mask=kept[:, None] & (channels < D)[None, :])


@triton.jit
def _seen(key_mask, place, inside, MASKED: tl.constexpr):
    """Which keys of a chunk take part."""
    if MASKED:
        inside = inside & (tl.load(key_mask + place, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _segment(segment_ids, step, steps, residue, d, REVERSED: tl.constexpr):
    """The document of a step, −1 outside the sequence."""
    there = (step >= 0) & (step < steps)
    return tl.load(segment_ids + _position(step, steps, residue, d, REVERSED), mask=there, other=-1)


@triton.jit
def _writing(table, exponents, CHUNK: tl.constexpr, SLOPES: tl.constexpr, POWERS: tl.constexpr):
    """What `_advance` needs of the table, read once before a loop: a loop that writes reads it anew every time.

    Returns:
        The weights ζ z^k and ζ ∂z^k/∂decay of rows, [C], then z^C, what float32 leaves of it, and ∂z^C/∂decay; each as
        (real, imaginary).
    """
    real, imaginary = _entry(table, WRITE, exponents, POWERS)
    slope, imaginary_slope = real, imaginary
    if SLOPES:
        slope, imaginary_slope = _entry(table, DWRITE, exponents, POWERS)
    z_real, z_imaginary = _entry(table, Z, CHUNK, POWERS)
    rest, imaginary_rest = _entry(table, REST, CHUNK, POWERS)
    d_real, d_imaginary = _entry(table, DZ, CHUNK, POWERS)
    return real, imaginary, slope, imaginary_slope, z_real, z_imaginary, rest, imaginary_rest, d_real, d_imaginary


@triton.jit
def _reading(table, exponents, SLOPES: tl.constexpr, POWERS: tl.constexpr):
    """What reading a state needs of the table: z^k and ∂z^k/∂decay of rows, as (real, imaginary), [C] each."""
    real, imaginary = _entry(table, Z, exponents, POWERS)
    slope, imaginary_slope = real, imaginary
    if SLOPES:
        slope, imaginary_slope = _entry(table, DZ, exponents, POWERS)
    return real, imaginary, slope, imaginary_slope


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
def _advance(h_real, h_imaginary, q_real, q_imaginary, x, writing, taken, keep, SLOPES: tl.constexpr):
    """The states on the other side of a chunk, from its rows.

    Where:
        h_real, h_imaginary: h, [BLOCK].
        q_real, q_imaginary: ∂h/∂decay, [BLOCK], looked at with SLOPES.
        x: the rows, [C, BLOCK] float32.
        writing: of `_writing`, with the steps from each row to that side as exponents.
        taken: 1 where a row belongs to the document on the other side, [C].
        keep: 1 where the state does.
    """
    real, imaginary, slope, imaginary_slope, z_real, z_imaginary, rest, imaginary_rest, d_real, d_imaginary = writing
    written, imaginary_written = _sums(x, real * taken, imaginary * taken)
    moved, imaginary_moved = _step_on(h_real, h_imaginary, z_real, z_imaginary, rest, imaginary_rest)
    if SLOPES:
        q_moved, q_imaginary_moved = _step_on(q_real, q_imaginary, z_real, z_imaginary, rest, imaginary_rest)
        q_moved += d_real * h_real - d_imaginary * h_imaginary
        q_imaginary_moved += d_real * h_imaginary + d_imaginary * h_real
        q_written, q_imaginary_written = _sums(x, slope * taken, imaginary_slope * taken)
        q_real, q_imaginary = keep * q_moved + q_written, keep * q_imaginary_moved + q_imaginary_written
    return keep * moved + written, keep * imaginary_moved + imaginary_written, q_real, q_imaginary


@triton.jit
def _borders(
    segment_ids,
    chunk,
    steps,
    residue,
    d,
    CHUNK: tl.constexpr,
    REVERSED: tl.constexpr,
    PACKED: tl.constexpr,
    FROM_RIGHT: tl.constexpr,
):
    """Where documents let a state pass: which rows it reaches, which rows write into it, and whether it goes on."""
    reached, taken, keep = 1.0, 1.0, 1.0
    if PACKED:
        step = chunk * CHUNK + tl.arange(0, CHUNK)
        own = _segment(segment_ids, step, steps, residue, d, REVERSED)
        first, last = chunk * CHUNK, (chunk + 1) * CHUNK - 1
        if FROM_RIGHT:
            before = _segment(segment_ids, last + 1, steps, residue, d, REVERSED)
            after = _segment(segment_ids, first, steps, residue, d, REVERSED)
        else:
            before = _segment(segment_ids, first - 1, steps, residue, d, REVERSED)
            after = _segment(segment_ids, last, steps, residue, d, REVERSED)
        reached, taken = (own == before).to(tl.float32), (own == after).to(tl.float32)
        keep = (before == after).to(tl.float32)
    return reached, taken, keep


@triton.jit
def _walk(
    h_real,
    h_imaginary,
    q_real,
    q_imaginary,
    x,
    x_stride,
    shift,
    count,
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
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    POWERS: tl.constexpr,
    STAGES: tl.constexpr,
    SLOPES: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSED: tl.constexpr,
    FROM_RIGHT: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Carry the states over the chunks `first` … `last` − 1, from the left or from the right.

    Where:
        h_real, h_imaginary, q_real, q_imaginary: the states that enter, [BLOCK].
        x: a row and head of V or of dOut.
        shift, count: rows of x are the positions `shift` … `shift` + `count` − 1.
        entering: with KEPT, where the states that enter each chunk go, [chunks, 2 or 4, BLOCK].

    Returns:
        The states that leave.
    """
    i = tl.arange(0, CHUNK)
    exponents = i if FROM_RIGHT else CHUNK - 1 - i
    writing = _writing(table, exponents, CHUNK, SLOPES, POWERS)
    states: tl.constexpr = 4 if SLOPES else 2
    for number in tl.range(0, last - first, num_stages=STAGES):
        chunk = last - 1 - number if FROM_RIGHT else first + number
        position, inside = _positions(chunk, steps, residue, d, CHUNK, REVERSED)
        place = position - shift
        kept = _seen(key_mask, position, inside & (place >= 0) & (place < count), MASKED)
        tile = _load_rows(x, place, x_stride, kept, channels, D, BLOCK).to(tl.float32)
        if KEPT:
            into = entering + chunk.to(tl.int64) * (states * BLOCK) + tl.arange(0, BLOCK)
            # Nothing enters the last chunk from the right, and it has no place.
            has_place = (chunk + 1) * CHUNK < steps + tl.zeros([BLOCK], tl.int32)
            tl.store(into, h_real, mask=has_place)
            tl.store(into + BLOCK, h_imaginary, mask=has_place)
            if SLOPES:
                tl.store(into + 2 * BLOCK, q_real, mask=has_place)
                tl.store(into + 3 * BLOCK, q_imaginary, mask=has_place)
        _reached, taken, keep = _borders(segment_ids, chunk, steps, residue, d, CHUNK, REVERSED, PACKED, FROM_RIGHT)
        h_real, h_imaginary, q_real, q_imaginary = _advance(
            h_real, h_imaginary, q_real, q_imaginary, tile, writing, taken, keep, SLOPES
        )
    return h_real, h_imaginary, q_real, q_imaginary


@triton.jit
def _load_states(pointers, mask, BLOCK: tl.constexpr, SLOPES: tl.constexpr):
    """States h and, with SLOPES, q, from where a kernel left them."""
    h_real = tl.load(pointers, mask=mask, other=0.0)
    h_imaginary = tl.load(pointers + BLOCK, mask=mask, other=0.0)
    q_real, q_imaginary = h_real, h_imaginary
    if SLOPES:
        q_real = tl.load(pointers + 2 * BLOCK, mask=mask, other=0.0)
        q_imaginary = tl.load(pointers + 3 * BLOCK, mask=mask, other=0.0)
    return h_real, h_imaginary, q_real, q_imaginary


@triton.jit
def _states_of_split(
    splits,
    segment_ids,
    table,
    split,
    stride,
    steps,
    per_split,
    residue,
    d,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    POWERS: tl.constexpr,
    SLOPES: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSED: tl.constexpr,
    FROM_RIGHT: tl.constexpr,
):
    """The states that enter a split: what all splits on that side write, each weighted with z^{L k}."""
    h, h_of_imaginary = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    q, q_of_imaginary = h, h_of_imaginary
    if SPLITS > 1:
        m = tl.arange(0, SPLITS)
        if FROM_RIGHT:
            between = m - split - 1
            edge, own = (split + 1) * per_split, m * per_split
            splits += 4 * BLOCK
        else:
            between = split - 1 - m
            edge, own = split * per_split - 1, (m + 1) * per_split - 1
        used = (between >= 0) & (m * per_split < steps)
        if PACKED:
            there = _segment(segment_ids, own, steps, residue, d, REVERSED)
            used = used & (there == _segment(segment_ids, edge, steps, residue, d, REVERSED))
        exponent = CHUNK + 1 + tl.where(used, between, 0)
        pointers = splits + (m.to(tl.int64) * stride)[:, None] + tl.arange(0, BLOCK)[None, :]
        h_real, h_imaginary, q_real, q_imaginary = _load_states(pointers, used[:, None], BLOCK, SLOPES)
        real, imaginary = _entry(table, Z, exponent, POWERS)
        real, imaginary = real[:, None], imaginary[:, None]
        h = tl.sum(real * h_real - imaginary * h_imaginary, axis=0)
        h_of_imaginary = tl.sum(real * h_imaginary + imaginary * h_real, axis=0)
        if SLOPES:
            slope, imaginary_slope = _entry(table, DZ, exponent, POWERS)
            slope, imaginary_slope = slope[:, None], imaginary_slope[:, None]
            q_real, q_imaginary = real * q_real - imaginary * q_imaginary, real * q_imaginary + imaginary * q_real
            q = tl.sum(q_real + slope * h_real - imaginary_slope * h_imaginary, axis=0)
            q_of_imaginary = tl.sum(q_imaginary + slope * h_imaginary + imaginary_slope * h_real, axis=0)
    return h, h_of_imaginary, q, q_of_imaginary


@triton.jit
def splits_kernel(
    x,
    key_mask,
    segment_ids,
    columns,
    heads,
    table,
    splits,
    rows,
    num_columns,
    length,
    shift,
    count,
    heads_per_value,
    x_b,
    x_h,
    x_s,
    mask_b,
    segments_b,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    POWERS: tl.constexpr,
    STAGES: tl.constexpr,
    SLOPES: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSED: tl.constexpr,
):
    """What each split of V, or of dOut, writes into the states on either side: [programs, 2 sides, 4, BLOCK]."""
    head, residue, row, block, split, _column = _program(columns, num_columns, rows, BLOCKS)
    d = tl.load(heads + 2 * head)
    table += head * TABLE_ROWS * POWERS
    steps = tl.cdiv(length - residue, d)
    per_split = _steps_of_split(length, d, CHUNK, SPLITS)
    first = split * (per_split // CHUNK)
    last = tl.minimum(first + per_split // CHUNK, tl.cdiv(steps, CHUNK))
    channels = block * BLOCK + tl.arange(0, BLOCK)
    x += row * x_b + (head // heads_per_value).to(tl.int64) * x_h
    key_mask += row * mask_b
    segment_ids += row * segments_b
    into = splits + tl.program_id(0).to(tl.int64) * (8 * BLOCK) + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    for side in tl.static_range(1 if CAUSAL else 2):
        h_real, h_imaginary, q_real, q_imaginary = _walk(
            zero,
            zero,
            zero,
            zero,
            x,
            x_s,
            shift,
            count,
            key_mask,
            segment_ids,
            table,
            splits,
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
            SLOPES,
            MASKED,
            PACKED,
            REVERSED,
            FROM_RIGHT=side == 1,
            KEPT=False,
        )
        tl.store(into + (4 * side) * BLOCK, h_real)
        tl.store(into + (4 * side + 1) * BLOCK, h_imaginary)
        if SLOPES:
            tl.store(into + (4 * side + 2) * BLOCK, q_real)
            tl.store(into + (4 * side + 3) * BLOCK, q_imaginary)
