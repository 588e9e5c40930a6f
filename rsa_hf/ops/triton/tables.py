"""What kernels are compiled for; the kernel that computes a table of powers of the rates, and helpers that read it."""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        head_size: D.
        block: channels per program.
        blocks: programs per head, so that they have all of its channels.
        chunk: C, steps per chunk.
        splits: number of splits of the sequence.
        powers: length of a row of the table.
        stages: number of chunks in flight from memory.
        causal: masked or unmasked REMs.
        mixed: whether P V is mixed into attention.
        masked: whether there is a key mask.
        packed: whether there are documents.
        free: whether amplitudes are given.
        halves: whether the Toeplitz matrix is a sum of two 16-bit matrices.
    """

    head_size: int
    block: int
    blocks: int
    chunk: int
    splits: int
    powers: int
    stages: int
    causal: bool
    mixed: bool
    masked: bool
    packed: bool
    free: bool
    halves: bool


# Rows of a head's table, two each for the real and the imaginary part: z^k, ∂z^k/∂decay, c z^k with the amplitude c,
# and the rounding error of z^k in float32.
Z, DZ, READ, REST = (tl.constexpr(row) for row in (0, 2, 4, 6))
TABLE_ROWS = tl.constexpr(8)


@triton.jit
def powers_kernel(decay, theta, amplitude, heads, table, length, SHAPE: tl.constexpr):
    """A head's table at the exponents 0 … C, then L·m for the splits m = 0, 1, …: [H, 8, powers] float32.

    Where:
        decay, theta: (pointer, stride).
        amplitude: real and imaginary part of c of each head, [H, 2]; not read unless SHAPE.free.
        heads: dilation, kind and index of each head, [H, 3].
    """
    head = tl.program_id(0)
    d = tl.load(heads + 3 * head)
    rho = _load_of_head(decay, head).to(tl.float64)
    angle = _load_of_head(theta, head).to(tl.float64)
    z, z_imaginary = rho * tl.cos(angle), rho * tl.sin(angle)
    c, c_imaginary = _amplitude_of_head(amplitude, heads, head, z, z_imaginary, SHAPE.free)
    per_split = _steps_of_split(length, d, SHAPE)
    entry = tl.arange(0, SHAPE.powers)
    k = tl.where(entry <= SHAPE.chunk, entry, (entry - SHAPE.chunk - 1) * per_split)

    real, imaginary = _power(rho, angle, k, k)
    slope, imaginary_slope = _power(rho, angle, tl.maximum(k - 1, 0), k)
    slope, imaginary_slope = slope * k, imaginary_slope * k
    into = table + head * TABLE_ROWS * SHAPE.powers + entry
    _store_complex(into, Z, real, imaginary, SHAPE)
    _store_complex(into, DZ, slope, imaginary_slope, SHAPE)
    rest, imaginary_rest = real - real.to(tl.float32), imaginary - imaginary.to(tl.float32)
    _store_complex(into, REST, rest, imaginary_rest, SHAPE)
    _store_complex(into, READ, c * real - c_imaginary * imaginary, c * imaginary + c_imaginary * real, SHAPE)


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
def _store_complex(into, row: tl.constexpr, real, imaginary, SHAPE: tl.constexpr):
    tl.store(into + row * SHAPE.powers, real.to(tl.float32))
    tl.store(into + (row + 1) * SHAPE.powers, imaginary.to(tl.float32))


@triton.jit
def _load_of_head(numbers, head):
    """The number of a head, from (pointer, stride)."""
    pointer, stride = numbers
    return tl.load(pointer + head * stride)


@triton.jit
def _amplitude_of_head(amplitude, heads, head, z, z_imaginary, FREE: tl.constexpr):
    """Real and imaginary part of c in float64: given, or the paper's, z, of sin heads −i z."""
    if FREE:
        real, imaginary = (
            tl.load(amplitude + 2 * head).to(tl.float64),
            tl.load(amplitude + 2 * head + 1).to(tl.float64),
        )
    else:
        is_sin = tl.load(heads + 3 * head + 1) == 2
        real, imaginary = tl.where(is_sin, z_imaginary, z), tl.where(is_sin, -z, z_imaginary)
    return real, imaginary


@triton.jit
def _entry(table, row: tl.constexpr, exponents, SHAPE: tl.constexpr):
    """A complex row of a head's table at some exponents, as (real, imaginary)."""
    return tl.load(table + row * SHAPE.powers + exponents), tl.load(table + (row + 1) * SHAPE.powers + exponents)


@triton.jit
def _toeplitz(table, row: tl.constexpr, SHAPE: tl.constexpr):
    """One row of the table for the lags i − j of a chunk, less 1, [C, C]; |i − j| − 1 for unmasked REMs."""
    i = tl.arange(0, SHAPE.chunk)
    lags = i[:, None] - i[None, :]
    lags = lags if SHAPE.causal else tl.abs(lags)
    return tl.load(table + row * SHAPE.powers + lags - 1, mask=lags > 0, other=0.0)


@triton.jit
def _halves(matrix, DTYPE: tl.constexpr, SHAPE: tl.constexpr):
    """A float32 matrix as (high, low), a sum of two of DTYPE; with operands of float32 the matrix itself."""
    high = matrix
    low = matrix
    if SHAPE.halves:
        high = matrix.to(DTYPE)
        low = (matrix - high.to(tl.float32)).to(DTYPE)
    return high, low


@triton.jit
def _multiply(high, low, x, acc, SHAPE: tl.constexpr):
    """The sum of acc and matrix @ x."""
    if SHAPE.halves:
        acc = tl.dot(low, x, acc)
        acc = tl.dot(high, x, acc)
    else:
        acc = tl.dot(high, x, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _steps_of_split(length, d, SHAPE: tl.constexpr):
    """L: a whole number of chunks."""
    return tl.cdiv(tl.cdiv(tl.cdiv(length, d), SHAPE.chunk), SHAPE.splits) * SHAPE.chunk
