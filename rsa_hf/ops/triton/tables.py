"""What kernels are compiled for; the kernel that computes a table of powers of the rates, and helpers that read it."""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    head_size: int  # D
    block: int  # channels per program
    blocks: int  # programs per head, which together have all of its channels
    chunk: int  # C, steps per chunk
    splits: int  # of the sequence
    powers: int  # length of a row of the table
    stages: int  # chunks in flight from memory
    causal: bool  # masked or unmasked REMs
    mixed: bool  # whether P V is mixed into attention
    masked: bool  # whether there is a key mask
    packed: bool  # whether there are documents
    windowed: bool  # whether a sliding window hides keys
    halves: bool  # whether the Toeplitz matrix is a sum of two 16-bit matrices
    lags: int  # K, the number of free lags
    scale: float  # of what is learned (`Layout`)


# Rows of a head's table, two each for the real and the imaginary part: z^k, ∂z^k/∂decay, c z^k with the amplitude c,
# and the rounding error of z^k in float32. ADDED is one row: the weight of step k + 1 minus the paper's.
Z, DZ, READ, REST, ADDED = (tl.constexpr(row) for row in (0, 2, 4, 6, 8))
TABLE_ROWS = tl.constexpr(9)

# Columns of `heads`, [R, 6] int32: `HeadRow` of problem.py.
INDEX, KIND, DILATION, GATE, RATE, LAGS = (tl.constexpr(column) for column in range(6))
COLUMNS = tl.constexpr(6)


@triton.jit
def powers_kernel(learned, heads, table, length, farthest, SHAPE: tl.constexpr):
    """A head's table at the exponents 0 … C, then L·m for the splits m = 0, 1, …: [R, 9, powers] float32.

    With a window of N steps, also at N, after the splits. If N ≤ C, all other entries from z^N on are 0: then a state
    has only the last N rows of the chunk that wrote it, and only N rows of a chunk read it.

    Where:
        learned: mu, eta, nu, theta and free_lags, contiguous; those that no head reads may be anything.
        heads: `Layout.numbers`, [R, 6].
        farthest: the longest lag that the window shows; if windowed.
    """
    head = tl.program_id(0)
    d = of_row(heads, head, DILATION)
    rho, _slope, angle, _turn = rates(learned, heads, head, SHAPE)
    c = amplitudes(heads, head, (rho * tl.cos(angle), rho * tl.sin(angle)))
    per_split = steps_of_split(length, d, SHAPE)
    entry = tl.arange(0, SHAPE.powers)
    k = tl.where(entry <= SHAPE.chunk, entry, (entry - SHAPE.chunk - 1) * per_split)
    shown = entry >= 0
    if SHAPE.windowed:
        steps_back, is_last = farthest // d, entry > SHAPE.chunk + SHAPE.splits
        k = tl.where(is_last, steps_back, k)
        shown = is_last | (steps_back > SHAPE.chunk) | (k < steps_back)

    power, before = power_of(rho, angle, k, k), power_of(rho, angle, tl.maximum(k - 1, 0), k)
    power, before = _where(shown, power), _where(shown, before)
    f = times(c, power)
    into = table + head * TABLE_ROWS * SHAPE.powers + entry
    _store_complex(into, Z, power, SHAPE)
    _store_complex(into, DZ, (before[0] * k, before[1] * k), SHAPE)
    _store_complex(into, REST, (power[0] - power[0].to(tl.float32), power[1] - power[1].to(tl.float32)), SHAPE)
    _store_complex(into, READ, f, SHAPE)
    if SHAPE.lags > 0:
        _mu, _eta, _nu, _theta, free_lags = learned
        is_free = (entry < SHAPE.lags) & shown
        free = tl.load(free_lags + SHAPE.lags * of_row(heads, head, LAGS) + entry, mask=is_free, other=0.0)
        tl.store(into + ADDED * SHAPE.powers, tl.where(is_free, free.to(tl.float64) - f[0], 0.0).to(tl.float32))


@triton.jit
def times(a, b):
    """The product of two complex numbers, (real, imaginary) each."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


@triton.jit
def plus(a, b):
    """The sum of two complex numbers."""
    return a[0] + b[0], a[1] + b[1]


@triton.jit
def _where(condition, a):
    return tl.where(condition, a[0], 0.0), tl.where(condition, a[1], 0.0)


@triton.jit
def power_of(rho, angle, k, turns):
    """rho^k e^{i·angle·turns} in float64; 0^0 is 1."""
    size = tl.abs(rho)
    exponent = k.to(tl.float64) * tl.log(tl.where(size > 0, size, 1.0))
    modulus = tl.where(k == 0, 1.0, tl.where(size > 0, tl.exp(exponent), 0.0))
    modulus = tl.where(k % 2 == 1, tl.where(rho < 0, -modulus, modulus), modulus)
    turned = turns.to(tl.float64) * angle
    return modulus * tl.cos(turned), modulus * tl.sin(turned)


@triton.jit
def _store_complex(into, row: tl.constexpr, number, SHAPE: tl.constexpr):
    tl.store(into + row * SHAPE.powers, number[0].to(tl.float32))
    tl.store(into + (row + 1) * SHAPE.powers, number[1].to(tl.float32))


# --- from what is learned to gates and rates of heads, in float64, with derivatives ---------------------------------


@triton.jit
def of_row(heads, head, COLUMN: tl.constexpr):
    """An entry of a head's row."""
    return tl.load(heads + COLUMNS * head + COLUMN)


@triton.jit
def _sigmoid(x, SHAPE: tl.constexpr):
    """sigmoid(scale · x) and its derivative; x itself if there is no scale."""
    y, slope = x, tl.full(x.shape, 1.0, tl.float64)
    if SHAPE.scale != 0:
        scale = tl.full(x.shape, SHAPE.scale, tl.float64)
        y = 1.0 / (1.0 + tl.exp(-scale * x))
        slope = scale * y * (1.0 - y)
    return y, slope


@triton.jit
def _tanh(x, SHAPE: tl.constexpr):
    """tanh(scale · x) and its derivative; x itself if there is no scale."""
    y, slope = x, tl.full(x.shape, 1.0, tl.float64)
    if SHAPE.scale != 0:
        scale = tl.full(x.shape, SHAPE.scale, tl.float64)
        y = 2.0 / (1.0 + tl.exp(-2.0 * scale * x)) - 1.0
        slope = scale * (1.0 - y * y)
    return y, slope


@triton.jit
def gates(learned, heads, head, SHAPE: tl.constexpr):
    """The gates of heads, and ∂g/∂mu; only if P V is mixed."""
    mu, _eta, _nu, _theta, _free_lags = learned
    return _sigmoid(tl.load(mu + of_row(heads, head, GATE)).to(tl.float64), SHAPE)


@triton.jit
def rates(learned, heads, head, SHAPE: tl.constexpr):
    """Decay of heads, ∂decay/∂eta or /∂nu, their angle, and its derivative."""
    _mu, eta, nu, theta, _free_lags = learned
    place, is_regular = of_row(heads, head, RATE), of_row(heads, head, KIND) == 0
    turns = is_regular == 0
    lam, lam_slope = _tanh(tl.load(eta + place, mask=is_regular, other=0.0).to(tl.float64), SHAPE)
    gamma, gamma_slope = _sigmoid(tl.load(nu + place, mask=turns, other=0.0).to(tl.float64), SHAPE)
    angle = tl.load(theta + place, mask=turns, other=0.0).to(tl.float64)
    turn = tl.full(angle.shape, 1.0 if SHAPE.scale == 0 else SHAPE.scale, tl.float64)
    rho, slope = tl.where(is_regular, lam, gamma), tl.where(is_regular, lam_slope, gamma_slope)
    if SHAPE.mixed and SHAPE.scale != 0:  # behind a shut gate too, P V must not overflow: 0 · inf would be NaN
        gate, _gate_slope = gates(learned, heads, head, SHAPE)
        is_shut = gate.to(tl.float32) == 0.0
        rho, slope = tl.where(is_shut, 0.0, rho), tl.where(is_shut, 0.0, slope)
    return rho, slope, turn * angle, turn


@triton.jit
def amplitudes(heads, head, z):
    """The amplitude c of heads: z, or −i z for sin heads."""
    is_sin = of_row(heads, head, KIND) == 2
    return tl.where(is_sin, z[1], z[0]), tl.where(is_sin, -z[0], z[1])


# --- readers of the table -------------------------------------------------------------------------------------------


@triton.jit
def entry_at(table, row: tl.constexpr, exponents, SHAPE: tl.constexpr):
    """A complex row of a head's table at some exponents, as (real, imaginary)."""
    return tl.load(table + row * SHAPE.powers + exponents), tl.load(table + (row + 1) * SHAPE.powers + exponents)


@triton.jit
def at_window(table, row: tl.constexpr, SHAPE: tl.constexpr):
    """A complex row of a head's table at the exponent N."""
    return entry_at(table, row, SHAPE.chunk + 1 + SHAPE.splits, SHAPE)


@triton.jit
def toeplitz(table, row: tl.constexpr, SHAPE: tl.constexpr):
    """One row of the table at the exponents i − j − 1 of a chunk, [C, C]; |i − j| − 1 for unmasked REMs."""
    i = tl.arange(0, SHAPE.chunk)
    lags = i[:, None] - i[None, :]
    lags = lags if SHAPE.causal else tl.abs(lags)
    return tl.load(table + row * SHAPE.powers + lags - 1, mask=lags > 0, other=0.0)


@triton.jit
def weights_of_chunk(table, SHAPE: tl.constexpr):
    """The weights of a chunk, [C, C]."""
    weights = toeplitz(table, READ, SHAPE)
    if SHAPE.lags > 0:
        weights += toeplitz(table, ADDED, SHAPE)
    return weights


@triton.jit
def added_across(table, m: tl.constexpr, SHAPE: tl.constexpr, FROM_RIGHT: tl.constexpr):
    """For each step of a chunk, [C], what free lags add to the weight of the (m + 1)-th step beyond the edge."""
    i = tl.arange(0, SHAPE.chunk)
    lag = (SHAPE.chunk - 1 - i if FROM_RIGHT else i) + m  # less 1
    return tl.load(table + ADDED * SHAPE.powers + lag, mask=lag < SHAPE.lags, other=0.0)


@triton.jit
def in_halves(matrix, DTYPE: tl.constexpr, SHAPE: tl.constexpr):
    """A float32 matrix as (high, low), the sum of two matrices of DTYPE; for float32 operands the matrix itself."""
    high = matrix
    low = matrix
    if SHAPE.halves:
        high = matrix.to(DTYPE)
        low = (matrix - high.to(tl.float32)).to(DTYPE)
    return high, low


@triton.jit
def multiply(high, low, x, acc, SHAPE: tl.constexpr):
    """The sum of acc and matrix @ x."""
    if SHAPE.halves:
        acc = tl.dot(low, x, acc)
        acc = tl.dot(high, x, acc)
    else:
        acc = tl.dot(high, x, acc, input_precision="tf32x3")
    return acc


@triton.jit
def steps_of_split(length, d, SHAPE: tl.constexpr):
    """L, the steps of a split: a whole number of chunks."""
    return tl.cdiv(tl.cdiv(tl.cdiv(length, d), SHAPE.chunk), SHAPE.splits) * SHAPE.chunk
