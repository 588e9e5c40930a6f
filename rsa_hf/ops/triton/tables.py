"""The kernel that computes a table of powers of the rates, and helpers that read it."""

import triton
import triton.language as tl

# Rows of a head's table, two each for the real and the imaginary part: z^k, ∂z^k/∂decay, ζ z^k, ζ ∂z^k/∂decay, and the
# rounding error of z^k in float32.
Z, DZ, WRITE, DWRITE, REST = (tl.constexpr(row) for row in (0, 2, 4, 6, 8))
TABLE_ROWS = tl.constexpr(10)


@triton.jit
def powers_kernel(
    decay,
    theta,
    heads,
    table,
    length,
    decay_stride,
    theta_stride,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    POWERS: tl.constexpr,
):
    """A head's table at the exponents 0 … C, then L·m for the splits m = 0, 1, …: [H, 10, POWERS] float32."""
    head = tl.program_id(0)
    d = tl.load(heads + 2 * head)
    kind = tl.load(heads + 2 * head + 1)
    rho = tl.load(decay + head * decay_stride).to(tl.float64)
    angle = tl.where(kind > 0, tl.load(theta + head * theta_stride).to(tl.float64), 0.0)
    per_split = _steps_of_split(length, d, CHUNK, SPLITS)
    entry = tl.arange(0, POWERS)
    k = tl.where(entry <= CHUNK, entry, (entry - CHUNK - 1) * per_split)

    real, imaginary = _power(rho, angle, k, k)
    slope, imaginary_slope = _power(rho, angle, tl.maximum(k - 1, 0), k)
    slope, imaginary_slope = slope * k, imaginary_slope * k
    into = table + head * TABLE_ROWS * POWERS + entry
    _store_complex(into, Z, real, imaginary, POWERS)
    _store_complex(into, DZ, slope, imaginary_slope, POWERS)
    rest, imaginary_rest = real - real.to(tl.float32), imaginary - imaginary.to(tl.float32)
    _store_complex(into, REST, rest, imaginary_rest, POWERS)
    is_sin = kind == 2
    _store_complex(into, WRITE, tl.where(is_sin, imaginary, real), tl.where(is_sin, -real, imaginary), POWERS)
    written, imaginary_written = tl.where(is_sin, imaginary_slope, slope), tl.where(is_sin, -slope, imaginary_slope)
    _store_complex(into, DWRITE, written, imaginary_written, POWERS)


@triton.jit
def _power(rho, angle, k, turns):
    """rho^k e^{i·angle·turns} in float64; 0^0 is 1."""
    size = tl.abs(rho)
    exponent = k.to(tl.float64) * tl.log(tl.where(size > 0, size, 1.0))
    modulus = tl.where(k == 0, 1.0, tl.where(size > 0, tl.exp(exponent), 0.0))
    modulus = tl.where(k % 2 == 1, tl.where(rho < 0, -modulus, modulus), modulus)
    turned = turns.to(tl.float64) * angle
    return modulus * tl.cos(turned), modulus * tl.sin(turned)


@triton.jit
def _store_complex(into, row: tl.constexpr, real, imaginary, POWERS: tl.constexpr):
    tl.store(into + row * POWERS, real.to(tl.float32))
    tl.store(into + (row + 1) * POWERS, imaginary.to(tl.float32))


@triton.jit
def _entry(table, row: tl.constexpr, exponents, POWERS: tl.constexpr):
    """A complex row of a head's table at some exponents, as (real, imaginary)."""
    return tl.load(table + row * POWERS + exponents), tl.load(table + (row + 1) * POWERS + exponents)


@triton.jit
def _toeplitz(table, row: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, POWERS: tl.constexpr):
    """One row of the table at the lags i − j of a chunk, [C, C]; |i − j| for unmasked REMs."""
    i = tl.arange(0, CHUNK)
    lags = i[:, None] - i[None, :]
    lags = lags if CAUSAL else tl.abs(lags)
    return tl.load(table + row * POWERS + lags, mask=lags > 0, other=0.0)


@triton.jit
def _split(matrix, DTYPE: tl.constexpr):
    """A float32 matrix as a sum of two of DTYPE."""
    high = matrix.to(DTYPE)
    return high, (matrix - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _multiply(high, low, x, acc, SPLIT: tl.constexpr):
    """The sum of acc and matrix @ x."""
    if SPLIT:
        acc = tl.dot(low, x, acc)
        acc = tl.dot(high, x, acc)
    else:
        acc = tl.dot(high, x, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _steps_of_split(length, d, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """L: a whole number of chunks."""
    return tl.cdiv(tl.cdiv(tl.cdiv(length, d), CHUNK), SPLITS) * CHUNK
