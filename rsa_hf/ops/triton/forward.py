"""P V, alone or mixed into attention: one read of V and of attention, one write."""

import triton
import triton.language as tl

from rsa_hf.ops.triton import states, tables


@triton.jit
def add_readout(acc, state, reading, reached):
    """Add Re(c z^k h), row by row, where the state reaches."""
    h, _q = state
    real, imaginary = states.as_column((reading[0] * reached, reading[1] * reached))
    return acc + real * h[0][None, :] - imaginary * h[1][None, :]


@triton.jit
def add_across(acc, x, chunk, axis, SHAPE: tl.constexpr, BACKWARD: tl.constexpr):
    """Add what free lags add for the steps beyond the edges of a chunk."""
    K: tl.constexpr = SHAPE.lags
    SIDES: tl.constexpr = 1 if SHAPE.causal else 2
    i = chunk * SHAPE.chunk + tl.arange(0, SHAPE.chunk)
    for m in tl.static_range(0, K):
        for side in tl.static_range(0, SIDES):
            step = chunk * SHAPE.chunk - 1 - m if side == 0 else (chunk + 1) * SHAPE.chunk + m
            row = states.load_row(x, step, axis, SHAPE, BACKWARD)
            added = tables.added_across(axis.table, m, SHAPE, side == 1)
            if SHAPE.packed:
                same = states.document_at(i, axis, BACKWARD) == states.document_at(step, axis, BACKWARD)
                added = tl.where(same, added, 0.0)
            acc += added[:, None] * row[None, :]
    return acc


@triton.jit
def has_left(axis, SHAPE: tl.constexpr, FROM_RIGHT: tl.constexpr):
    """Where row i of a chunk reads row j of `states.load_leaving` in the state, but must not see it: [C, C]."""
    i = tl.arange(0, SHAPE.chunk)[:, None]
    lags = i - tl.arange(0, SHAPE.chunk)[None, :]
    if FROM_RIGHT:
        i, lags = SHAPE.chunk - 1 - i, -lags
    return (lags > 0) & (i < axis.steps_back)


@triton.jit
def weights_of_leaving(axis, DTYPE: tl.constexpr, SHAPE: tl.constexpr, FROM_RIGHT: tl.constexpr):
    """The weights, in two halves, by which rows of `states.load_leaving` take back what the state has of them."""
    real, imaginary = tables.at_window(axis.table, tables.READ, SHAPE)
    weights = imaginary * tables.toeplitz(axis.table, tables.Z + 1, SHAPE) - real * tables.toeplitz(
        axis.table, tables.Z, SHAPE
    )
    return tables.in_halves(tl.where(has_left(axis, SHAPE, FROM_RIGHT), weights, 0.0), DTYPE, SHAPE)


@triton.jit
def add_leaving(acc, leaving, weights, reached, SHAPE: tl.constexpr):
    """Take back what `add_readout` has added for rows that have left the window."""
    high, low = weights
    if SHAPE.packed:
        acc += reached[:, None] * tables.multiply(high, low, leaving, tl.zeros(acc.shape, tl.float32), SHAPE)
    else:
        acc = tables.multiply(high, low, leaving, acc, SHAPE)
    return acc


@triton.jit
def lerp(a, b, weight):
    """The mixture a + weight (b − a): exactly a where the weight is 0, exactly b where it is 1."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (1.0 - weight) * (b - a))


@triton.jit
def entering_of(entering, row, block, head, num_heads, slots, length, axis, SHAPE: tl.constexpr, STATES: tl.constexpr):
    """Where a program keeps the states that enter its chunks from the right."""
    slot = ((row * SHAPE.blocks + block) * num_heads + head) * slots
    slot += axis.residue * (tl.cdiv(tl.cdiv(length, axis.d), SHAPE.chunk) - 1)
    return entering + slot * (STATES * SHAPE.block)


@triton.jit
def forward_kernel(value, attention, learned, output, shared, splits, entering, sizes, SHAPE: tl.constexpr):
    """P V, or attention + g (P V − attention) if mixed; states.py describes the tuples.

    Where:
        value: V, a tensor [B, Hv, S, D].
        attention: a tensor [B, H', T, D]; not read unless mixed.
        output: a tensor, [B, H', T, D] if mixed, else [B, H, T, D].
        shared: key mask, [B or 1, S] bytes, 0 where a key is hidden, if masked, and the document of each position,
            [B, S], if packed, as (pointer, stride of rows) each; head and residue of each column, [columns, 2];
            `heads` and `table` of `powers_kernel`.
        learned: see `powers_kernel`.
        splits: from `splits_kernel`, unless there is one split.
        entering: for unmasked REMs, memory for [B, blocks, H, slots, 2, BLOCK].
        sizes: B, columns, H, keys to read, position of the first query, queries, heads per value head, slots, and the
            longest lag that a window shows.
    """
    BLOCK: tl.constexpr = SHAPE.block
    CHUNK: tl.constexpr = SHAPE.chunk
    rows, num_columns, num_heads, length, offset, queries, num_key_value_groups, slots, farthest = sizes
    heads = shared[3]
    owned = states.program_of(shared, rows, num_columns, length, 0, length, farthest, SHAPE)
    head, index, row, block, _column, axis, part = owned
    split, per_split, first, last = part
    channels = axis.channels
    v = states.rows_of_head(value, row, index // num_key_value_groups)
    out = states.rows_of_head(output, row, index)
    high, low = tables.in_halves(tables.weights_of_chunk(axis.table, SHAPE), v[0].dtype.element_ty, SHAPE)
    if SHAPE.mixed:
        softmax = states.rows_of_head(attention, row, index)
        gate, _slope = tables.gates(learned, heads, head, SHAPE)
        weight = gate.to(tl.float32)

    if not SHAPE.causal:
        entering = entering_of(entering, row, block, head, num_heads, slots, length, axis, SHAPE, 2)
        states.walk_from_right(splits, v, axis, part, entering, SHAPE, False)
    state = states.states_of_split(splits, axis, part, SHAPE, False, FROM_RIGHT=False)
    # Before the first query there are only states to carry, and after the last one nothing is left to do.
    begin = tl.minimum(tl.maximum(tl.maximum(offset - axis.residue, 0) // (axis.d * CHUNK), first), last)
    state = states.walk(state, v, axis, (split, per_split, first, begin), None, SHAPE, False, FROM_RIGHT=False)
    end = tl.minimum(tl.cdiv(tl.maximum(offset + queries - axis.residue, 0), axis.d * CHUNK), last)
    i = tl.arange(0, CHUNK)
    writing = states.powers_to_write(axis, CHUNK - 1 - i, SHAPE, False)
    from_left, from_right = (
        tables.entry_at(axis.table, tables.READ, i, SHAPE),
        tables.entry_at(axis.table, tables.READ, CHUNK - 1 - i, SHAPE),
    )
    if SHAPE.windowed:
        gone_left = weights_of_leaving(axis, v[0].dtype.element_ty, SHAPE, False)
        gone_right = gone_left if SHAPE.causal else weights_of_leaving(axis, v[0].dtype.element_ty, SHAPE, True)
    for number in tl.range(0, end - begin, num_stages=SHAPE.stages):
        chunk = begin + number
        position, inside = states.positions(chunk, axis, SHAPE, False)
        query = position - offset
        asked = inside & (query >= 0) & (query < queries)
        if SHAPE.mixed:
            unmixed = states.load_rows(softmax, query, asked, channels, SHAPE).to(tl.float32)
        x = states.load_rows(v, position, states.seen(axis, position, inside, SHAPE), channels, SHAPE)
        acc = tl.zeros([CHUNK, BLOCK], tl.float32)
        if SHAPE.packed:
            own = tl.load(axis.documents + position, mask=inside, other=-1)
            same = own[:, None] == own[None, :]
            acc = tables.multiply(tl.where(same, high, 0.0), tl.where(same, low, 0.0), x, acc, SHAPE)
        else:
            acc = tables.multiply(high, low, x, acc, SHAPE)
        if not SHAPE.causal:
            reached, taken, keep = states.borders(chunk, axis, SHAPE, False, True)
            pointers, has_place = states.place_of_state(entering, chunk, axis, SHAPE, False)
            acc = add_readout(acc, states.load_states(pointers, has_place, SHAPE, False), from_right, reached)
            if SHAPE.windowed:
                acc = add_leaving(
                    acc, states.load_leaving(v, chunk, axis, SHAPE, False, True), gone_right, reached, SHAPE
                )
        if SHAPE.lags > 0:
            acc = add_across(acc, v, chunk, axis, SHAPE, False)
        reached, taken, keep = states.borders(chunk, axis, SHAPE, False, False)
        acc = add_readout(acc, state, from_left, reached)
        leaving = None
        if SHAPE.windowed:
            leaving = states.load_leaving(v, chunk, axis, SHAPE, False, FROM_RIGHT=False)
            acc = add_leaving(acc, leaving, gone_left, reached, SHAPE)
        state = states.advance(state, x.to(tl.float32), leaving, writing, taken, keep, False)
        if SHAPE.mixed:
            acc = lerp(unmixed, acc, weight)
        states.store_rows(out, query, asked, channels, acc, SHAPE)
