"""Equation 4 for one query after cached keys: weights from what is learned, and one read of the values that matter."""

import triton
import triton.language as tl

from rsa_hf.ops.triton import forward, states, tables

NEGLIGIBLE = tl.constexpr(2.0**-30)  # share of the largest value, in P V: below what float32 resolves
FAR = tl.constexpr(2**30)


@triton.jit
def _reach(rho, SHAPE: tl.constexpr):
    """The number of steps that matter: with |z| = ρ, those beyond k add at most ρ^k / (1 − ρ) in all."""
    size = tl.abs(rho)
    decays = (size > 0.0) & (size < 1.0)
    inner = tl.where(decays, size, 0.5)
    steps = tl.ceil(tl.log((1.0 - inner) * NEGLIGIBLE) / tl.log(inner))
    steps = tl.where(decays, steps, tl.where(size == 0.0, 1.0, FAR))
    return tl.maximum(tl.minimum(steps, FAR).to(tl.int32), SHAPE.lags)


@triton.jit(do_not_specialize=["place", "farthest"])
def step_kernel(
    value,
    attention,
    learned,
    output,
    key_mask,
    position,
    heads,
    sizes,
    place,
    farthest,
    SHAPE: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """Each program computes one row, head and block of channels.

    Where, in addition to the parameters of `forward_kernel`:
        position: the query's place on the key axis, a number in memory; not read if KNOWN.
        sizes: R, heads per value head.
        place: the same place, passed as a number; if KNOWN.
        farthest: the longest lag that a window shows.
    """
    BLOCK: tl.constexpr = SHAPE.block
    CHUNK: tl.constexpr = SHAPE.chunk
    num_heads, num_key_value_groups = sizes
    program = tl.program_id(0)
    block, head = program % SHAPE.blocks, (program // SHAPE.blocks) % num_heads
    row = (program // (SHAPE.blocks * num_heads)).to(tl.int64)
    index, d = tables.of_row(heads, head, tables.INDEX), tables.of_row(heads, head, tables.DILATION)
    channels = block * BLOCK + tl.arange(0, BLOCK)
    v = states.rows_of_head(value, row, index // num_key_value_groups)
    mask, mask_stride = key_mask
    mask += row * mask_stride
    rho, _slope, angle, _turn = tables.rates(learned, heads, head, SHAPE)
    c = tables.amplitudes(heads, head, (rho * tl.cos(angle), rho * tl.sin(angle)))
    if not KNOWN:
        place = tl.load(position).to(tl.int32)
    steps = tl.minimum(tl.minimum(place, farthest) // d, _reach(rho, SHAPE))
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, steps, CHUNK):
        k = start + tl.arange(0, CHUNK)  # step k + 1
        key, seen = place - (k + 1) * d, k < steps
        if SHAPE.masked:
            seen = seen & (tl.load(mask + key, mask=seen, other=0) != 0)
        f, _imaginary = tables.times(c, tables.power_of(rho, angle, k, k))
        if SHAPE.lags > 0:
            free_lags, is_free = learned[4] + SHAPE.lags * tables.of_row(heads, head, tables.LAGS), k < SHAPE.lags
            f = tl.where(is_free, tl.load(free_lags + k, mask=is_free, other=0.0).to(tl.float64), f)
        x = states.load_rows(v, key.to(tl.int64), seen, channels, SHAPE).to(tl.float32)
        acc += tl.sum(f.to(tl.float32)[:, None] * x, axis=0)
    is_channel = channels < SHAPE.head_size
    if SHAPE.mixed:
        gate, _gate_slope = tables.gates(learned, heads, head, SHAPE)
        softmax, _position_stride = states.rows_of_head(attention, row, index)
        unmixed = tl.load(softmax + channels, mask=is_channel, other=0.0).to(tl.float32)
        acc = forward.lerp(unmixed, acc, gate.to(tl.float32))
    out, _out_stride = states.rows_of_head(output, row, index)
    tl.store(out + channels, acc.to(out.dtype.element_ty), mask=is_channel)
