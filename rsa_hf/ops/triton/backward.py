"""The gradients of `forward_kernel`, in one walk over dOut, V and attention."""

import triton
import triton.language as tl

from rsa_hf.ops.triton import forward, states, tables


@triton.jit
def _inner_products(v, x, acc):
    """Add v xᵀ, [C, C], without rounding the operands."""
    if v.dtype != x.dtype:
        v, x = v.to(tl.float32), x.to(tl.float32)
    return tl.dot(v, tl.trans(x), acc, input_precision="tf32x3")


@triton.jit
def _add_lost(lost, v, leaving, reached, SHAPE: tl.constexpr):
    """Add the inner products of a chunk's rows that a state reaches with the rows that leave the state."""
    if SHAPE.packed:
        v = tl.where(reached[:, None] != 0.0, v, 0.0)
    return _inner_products(v, leaving, lost)


@triton.jit
def _add_slope_of_readout(sums, v, state, power, slope, reached):
    """Add ⟨v, z^k h⟩ and its derivative, channel by channel, to two complex sums, [BLOCK] each."""
    product, change = sums
    h, q = state
    p, s = states.sums(v, power, reached), states.sums(v, slope, reached)
    # Written out, because `tables.plus` of two products takes more registers.
    real = s[0] * h[0] - s[1] * h[1] + p[0] * q[0] - p[1] * q[1]
    imaginary = s[0] * h[1] + s[1] * h[0] + p[0] * q[1] + p[1] * q[0]
    return tables.plus(product, tables.times(p, h)), tables.plus(change, (real, imaginary))


@triton.jit
def backward_kernel(
    grad, value, attention, learned, dvalue, dattention, partial, shared, splits, entering, sizes, SHAPE: tl.constexpr
):
    """The gradients of `forward_kernel`: a walk over dOut from the right to the left.

    Where, in addition to the parameters of `forward_kernel`:
        grad: dOut, in the shape of the output.
        dvalue: a tensor [B, H, S, D], of every head.
        dattention: a tensor [B, H', T, D]; if mixed.
        partial: per program ⟨dOut, attention⟩, the real and imaginary parts of Σ z^{k−1} r_k and of its derivative
            with respect to decay, where r_k is the correlation of dOut and V at lag k; then
            r_k of the free lags: [columns, B · blocks · splits, 5 + K].
        splits: those of dOut.
        entering: [B, blocks, H, slots, 4, BLOCK].
    """
    BLOCK: tl.constexpr = SHAPE.block
    CHUNK: tl.constexpr = SHAPE.chunk
    K: tl.constexpr = SHAPE.lags
    rows, num_columns, num_heads, length, offset, queries, num_key_value_groups, slots, farthest = sizes
    heads = shared[3]
    owned = states.program_of(shared, rows, num_columns, length, offset, queries, farthest, SHAPE)
    head, index, row, block, column, axis, part = owned
    split, _per_split, first, last = part
    channels, table = axis.channels, axis.table
    dout = states.rows_of_head(grad, row, index)
    v_rows = states.rows_of_head(value, row, index // num_key_value_groups)
    dv_rows = states.rows_of_head(dvalue, row, index)
    high, low = tables.in_halves(tables.weights_of_chunk(table, SHAPE), dout[0].dtype.element_ty, SHAPE)
    weight = 1.0
    if SHAPE.mixed:
        softmax = states.rows_of_head(attention, row, index)
        dsoftmax = states.rows_of_head(dattention, row, index)
        gate, _slope = tables.gates(learned, heads, head, SHAPE)
        weight = gate.to(tl.float32)

    if not SHAPE.causal:
        entering = forward.entering_of(entering, row, block, head, num_heads, slots, length, axis, SHAPE, 4)
        states.walk_from_right(splits, dout, axis, part, entering, SHAPE, True)
    state = states.states_of_split(splits, axis, part, SHAPE, True, FROM_RIGHT=False)
    zero = tl.zeros([BLOCK], tl.float32)
    sums, attended = ((zero, zero), (zero, zero)), zero
    inner = tl.zeros([CHUNK, CHUNK], tl.float32)
    across = tl.zeros([CHUNK], tl.float32)
    i = tl.arange(0, CHUNK)
    writing = states.powers_to_write(axis, CHUNK - 1 - i, SHAPE, True)
    from_left, from_right = (
        tables.entry_at(axis.table, tables.READ, i, SHAPE),
        tables.entry_at(axis.table, tables.READ, CHUNK - 1 - i, SHAPE),
    )
    left, left_slope = tables.entry_at(table, tables.Z, i, SHAPE), tables.entry_at(table, tables.DZ, i, SHAPE)
    right, right_slope = (
        tables.entry_at(table, tables.Z, CHUNK - 1 - i, SHAPE),
        tables.entry_at(table, tables.DZ, CHUNK - 1 - i, SHAPE),
    )
    lost_left, lost_right = inner, inner
    if SHAPE.windowed:
        gone_left = forward.weights_of_leaving(axis, dout[0].dtype.element_ty, SHAPE, False)
        gone_right = (
            gone_left if SHAPE.causal else forward.weights_of_leaving(axis, dout[0].dtype.element_ty, SHAPE, True)
        )
    for number in tl.range(0, last - first, num_stages=SHAPE.stages):
        chunk = first + number
        position, inside = states.positions(chunk, axis, SHAPE, True)
        query = position - offset
        asked = inside & (query >= 0) & (query < queries)
        seen = states.seen(axis, position, inside, SHAPE)
        x = states.load_rows(dout, query, asked, channels, SHAPE)
        v = states.load_rows(v_rows, position, seen, channels, SHAPE)
        wide = v.to(tl.float32)
        if SHAPE.mixed:
            unmixed = states.load_rows(softmax, query, asked, channels, SHAPE).to(tl.float32)
            attended += tl.sum(x.to(tl.float32) * unmixed, axis=0)
            states.store_rows(dsoftmax, query, asked, channels, (1.0 - weight) * x.to(tl.float32), SHAPE)

        acc = tl.zeros([CHUNK, BLOCK], tl.float32)
        if SHAPE.packed:
            own = tl.load(axis.documents + position, mask=inside, other=-1)
            same = own[:, None] == own[None, :]
            acc = tables.multiply(tl.where(same, high, 0.0), tl.where(same, low, 0.0), x, acc, SHAPE)
            of_chunk = _inner_products(v, x, tl.zeros([CHUNK, CHUNK], tl.float32))
            inner += tl.where(same, of_chunk, 0.0)
        else:
            acc = tables.multiply(high, low, x, acc, SHAPE)
            inner = _inner_products(v, x, inner)
        leaving = None
        reached, taken, keep = states.borders(chunk, axis, SHAPE, True, False)
        if SHAPE.windowed:  # not further down, where ptxas would spill six times as much for float32
            leaving = states.load_leaving(dout, chunk, axis, SHAPE, True, FROM_RIGHT=False)
            lost_left = _add_lost(lost_left, v, leaving, reached, SHAPE)
        if not SHAPE.causal:
            reached_right, _taken, _keep = states.borders(chunk, axis, SHAPE, True, True)
            pointers, has_place = states.place_of_state(entering, chunk, axis, SHAPE, True)
            other = states.load_states(pointers, has_place, SHAPE, True)
            acc = forward.add_readout(acc, other, from_right, reached_right)
            sums = _add_slope_of_readout(sums, wide, other, right, right_slope, reached_right)
            if SHAPE.windowed:
                others = states.load_leaving(dout, chunk, axis, SHAPE, True, FROM_RIGHT=True)
                acc = forward.add_leaving(acc, others, gone_right, reached_right, SHAPE)
                lost_right = _add_lost(lost_right, v, others, reached_right, SHAPE)
        if SHAPE.lags > 0:
            acc = forward.add_across(acc, dout, chunk, axis, SHAPE, True)
            across += _products_across(wide, dout, chunk, axis, SHAPE)
        acc = forward.add_readout(acc, state, from_left, reached)
        sums = _add_slope_of_readout(sums, wide, state, left, left_slope, reached)
        if SHAPE.windowed:
            acc = forward.add_leaving(acc, leaving, gone_left, reached, SHAPE)
        state = states.advance(state, x.to(tl.float32), leaving, writing, taken, keep, True)
        # Hidden keys get the gradient 0, which has to be written.
        states.store_rows(dv_rows, position, inside, channels, tl.where(seen[:, None], weight * acc, 0.0), SHAPE)

    part_of_column = (row * SHAPE.blocks + block) * SHAPE.splits + split
    into = partial + (column.to(tl.int64) * (rows * SHAPE.blocks * SHAPE.splits) + part_of_column) * (5 + SHAPE.lags)
    tl.store(into, tl.sum(attended))
    product = tables.plus(states.total(sums[0]), _weighted(inner, table, tables.Z, SHAPE))
    change = tables.plus(states.total(sums[1]), _weighted(inner, table, tables.DZ, SHAPE))
    if SHAPE.windowed:
        lost = tl.where(forward.has_left(axis, SHAPE, False), -lost_left, 0.0)
        if not SHAPE.causal:
            lost -= tl.where(forward.has_left(axis, SHAPE, True), lost_right, 0.0)
        power, slope = tables.at_window(table, tables.Z, SHAPE), tables.at_window(table, tables.DZ, SHAPE)
        gone = _weighted(lost, table, tables.Z, SHAPE)
        product = tables.plus(product, tables.times(power, gone))
        change = tables.plus(
            tables.plus(change, tables.times(slope, gone)),
            tables.times(power, _weighted(lost, table, tables.DZ, SHAPE)),
        )
    tl.store(into + 1, product[0])
    tl.store(into + 2, product[1])
    tl.store(into + 3, change[0])
    tl.store(into + 4, change[1])
    for k in tl.static_range(0, K):
        lags = i[:, None] - i[None, :]
        lags = lags if SHAPE.causal else tl.abs(lags)
        within = tl.sum(tl.sum(tl.where(lags == k + 1, inner, 0.0), axis=0))
        product_at_lag = within + tl.sum(tl.where(i == k, across, 0.0))
        if SHAPE.windowed:
            product_at_lag = tl.where(k < axis.steps_back, product_at_lag, 0.0)
        tl.store(into + 5 + k, product_at_lag)


@triton.jit
def _weighted(inner, table, row: tl.constexpr, SHAPE: tl.constexpr):
    """The sum over a matrix, [C, C], multiplied elementwise by a complex Toeplitz matrix."""
    real, imaginary = tables.toeplitz(table, row, SHAPE), tables.toeplitz(table, row + 1, SHAPE)
    return tl.sum(tl.sum(real * inner, axis=0)), tl.sum(tl.sum(imaginary * inner, axis=0))


@triton.jit
def _products_across(v, x, chunk, axis, SHAPE: tl.constexpr):
    """⟨v, x⟩ of a chunk's steps with those beyond its edges, summed by lag: [C], with lag k + 1 at entry k."""
    CHUNK: tl.constexpr = SHAPE.chunk
    K: tl.constexpr = SHAPE.lags
    SIDES: tl.constexpr = 1 if SHAPE.causal else 2
    i = tl.arange(0, CHUNK)
    products = tl.zeros([CHUNK], tl.float32)
    for m in tl.static_range(0, K):
        for side in tl.static_range(0, SIDES):
            step = chunk * SHAPE.chunk - 1 - m if side == 0 else (chunk + 1) * SHAPE.chunk + m
            row = states.load_row(x, step, axis, SHAPE, True)
            of_steps = tl.sum(v * row[None, :], axis=1)
            if SHAPE.packed:
                same = states.document_at(chunk * SHAPE.chunk + i, axis, True) == states.document_at(step, axis, True)
                of_steps = tl.where(same, of_steps, 0.0)
            between = i if side == 0 else SHAPE.chunk - 1 - i
            for k in tl.static_range(m, K):
                products += tl.where(i == k, tl.sum(tl.where(between + m == k, of_steps, 0.0)), 0.0)
    return products


@triton.jit
def learned_kernel(
    partial, learned, dlearned, heads, starts, sizes, SHAPE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of the learned numbers: the parts from each head's programs, added up in a fixed order.

    Each program looks at all heads, and writes the gradient of one number, or those of nu and theta at one place.

    Where:
        partial: from `backward_kernel`.
        dlearned: gradients of `learned`, of the same sizes.
        starts: where the columns of each head begin, and where the last ones end, (R + 1,).
        sizes: the lengths of mu, eta and nu, R ≤ HEADS, programs of a column, and the most parts that a head has.
    """
    K: tl.constexpr = SHAPE.lags
    dmu, deta, dnu, dtheta, dfree_lags = dlearned
    num_mu, num_eta, num_nu, num_heads, parts, longest = sizes
    program = tl.program_id(0)
    place = tl.arange(0, HEADS)
    is_head = place < num_heads
    head = tl.minimum(place, num_heads - 1)
    begin = tl.load(starts + head).to(tl.int64) * parts
    end = tl.where(is_head, tl.load(starts + head + 1).to(tl.int64) * parts, 0)
    attended = _sums_of_parts(partial, begin, end, longest, HEADS, BLOCK, SHAPE)
    product = (
        _sums_of_parts(partial + 1, begin, end, longest, HEADS, BLOCK, SHAPE),
        _sums_of_parts(partial + 2, begin, end, longest, HEADS, BLOCK, SHAPE),
    )
    change = (
        _sums_of_parts(partial + 3, begin, end, longest, HEADS, BLOCK, SHAPE),
        _sums_of_parts(partial + 4, begin, end, longest, HEADS, BLOCK, SHAPE),
    )

    rho, slope, angle, turn = tables.rates(learned, heads, head, SHAPE)
    direction = tl.cos(angle), tl.sin(angle)
    z = rho * direction[0], rho * direction[1]
    c, dc = tables.amplitudes(heads, head, z), tables.amplitudes(heads, head, direction)  # dc is ∂c/∂decay
    gate, gate_slope = turn * 0.0 + 1.0, turn * 0.0
    if SHAPE.mixed:
        gate, gate_slope = tables.gates(learned, heads, head, SHAPE)
    # The derivative of c Σ z^{k−1} r_k with respect to decay; ∂z/∂θ = i · decay · ∂z/∂decay.
    by_decay, by_imaginary_decay = tables.plus(tables.times(c, change), tables.times(dc, product))
    by_gate = tables.times(c, product)[0] - attended
    # A free lag replaces f(k) = Re(c z^{k−1}), whose derivative with respect to decay is k Re(∂c/∂decay z^{k−1}).
    of_lag = turn * 0.0
    for k in tl.static_range(0, K):
        sums = _sums_of_parts(partial + 5 + k, begin, end, longest, HEADS, BLOCK, SHAPE)
        place = SHAPE.lags * tables.of_row(heads, head, tables.LAGS) + k
        by_gate += (tl.load(learned[4] + place).to(tl.float64) - c[0]) * sums
        by_decay -= (k + 1) * dc[0] * sums
        by_imaginary_decay -= (k + 1) * dc[1] * sums
        c, dc = tables.times(z, c), tables.times(z, dc)
        of_lag += tl.where(is_head & (place == program - num_mu - num_eta - num_nu), sums, 0.0)

    is_regular = tables.of_row(heads, head, tables.KIND) == 0
    rate = tl.where(is_head, tables.of_row(heads, head, tables.RATE), -1)
    if program < num_mu:
        reads = is_head & (tables.of_row(heads, head, tables.GATE) == program)
        tl.store(dmu + program, tl.sum(tl.where(reads, gate_slope * by_gate, 0.0)))
    elif program < num_mu + num_eta:
        number = program - num_mu
        reads = is_regular & (rate == number)
        tl.store(deta + number, tl.sum(tl.where(reads, gate * slope * by_decay, 0.0)))
    elif program < num_mu + num_eta + num_nu:
        number = program - num_mu - num_eta
        reads = (is_regular == 0) & (rate == number)
        tl.store(dnu + number, tl.sum(tl.where(reads, gate * slope * by_decay, 0.0)))
        tl.store(dtheta + number, tl.sum(tl.where(reads, -gate * turn * rho * by_imaginary_decay, 0.0)))
    else:
        tl.store(dfree_lags + program - num_mu - num_eta - num_nu, tl.sum(gate * of_lag))


@triton.jit
def _sums_of_parts(partial, begin, end, longest, HEADS: tl.constexpr, BLOCK: tl.constexpr, SHAPE: tl.constexpr):
    """For each head, the sum of one number over all of its parts, in float64."""
    total = tl.zeros([HEADS, BLOCK], tl.float64)
    for start in tl.range(0, longest, BLOCK):
        place = begin[:, None] + start + tl.arange(0, BLOCK)[None, :]
        total += tl.load(partial + (5 + SHAPE.lags) * place, mask=place < end[:, None], other=0.0)
    return tl.sum(total, axis=1)
