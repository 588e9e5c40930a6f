r"""Powers of the complex rates z of the heads, and the matrices of the chunked algorithm.

z = λ for a regular head and z = γ e^{iθ} for a cyclical one (eqs. 2 and 3). A head reads the real part of a complex
number, a sin head its imaginary part. Complex numbers are stored as rows (real, imaginary), so all products are real.
For a chunk of C steps v_0 … v_{C−1} that is entered with the state h = Σ_{j≥0} z^j v_{−1−j}:

    y_i = Σ_{j<i} f(i − j) v_j + read(z^{i+1} h)        h' = z^C h + Σ_j z^{C−1−j} v_j

which is one real matrix, (y, h') = M (v, h), of shape [C + 2, C + 2]:

    M = [ block  readout ]      block[i, j] = f(i − j) where i > j, else 0
        [ write  z^C     ]

An unmasked REM also has a state that comes from the right, hence two more rows and columns, and |i − j| for i − j.

Every entry of these matrices, and of those that pass states on, is 0, Re z^k or ± Im z^k for some k. So the powers
are computed once, in one table, and each matrix is gathered from it by indices. The indices depend on the lengths
alone and are cached. Gathered from a table of ∂z^k/∂ρ, the matrix is its own derivative.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from rsa_hf.ops.types import Rems, widest_dtype

__all__ = ["Matrices", "kinds_mask", "powers_table", "weights_of_lags"]


class _Entries:
    """Indices into a head's row of the table (Re z^k, Im z^k, −Im z^k, 0), for `count` exponents."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.zero = 3 * count

    def read(self, k: Tensor, is_sin: bool) -> Tensor:
        return k + self.count * is_sin

    def complex(self, k: Tensor, conjugate: bool = False) -> Tensor:
        """Multiplication by z^k, 0 where k < 0, of rows of states: real parts first, then imaginary parts."""
        zero = torch.where(k < 0, self.zero, 0)
        k = k.clamp(min=0)
        real, imaginary, negative = (torch.where(zero > 0, zero, k + i * self.count) for i in range(3))
        if conjugate:
            imaginary, negative = negative, imaginary
        return torch.cat([torch.cat([real, negative], 1), torch.cat([imaginary, real], 1)], 0)


class _Level(NamedTuple):
    """Indices of the matrices of one level of M states: [H, 2·M + 2, 2·M] and [H, 2·M, 2]."""

    carry: Tensor
    readout: Tensor


class _Places(NamedTuple):
    exponents: Tensor
    chunk: Tensor
    levels: dict[tuple[int, bool, bool], _Level]
    doubled: dict[tuple[int, bool], Tensor]


@functools.lru_cache(maxsize=32)
def _places(
    kinds: tuple[str, ...], C: int, digits: tuple[int, ...], doublings: int, causal: bool, device: torch.device
) -> _Places:
    """Indices of the entries of all matrices in the table of their exponents."""
    exponents = list(range(C + 1))
    first_of_level, step = [], C
    for M in digits:
        first_of_level.append(len(exponents))
        exponents += [step * k for k in range(M + 1)]
        step *= M
    first_doubled = len(exponents)
    exponents += [C << i for i in range(doublings)]
    entries = _Entries(len(exponents))

    def of_heads(codes: Tensor) -> Tensor:
        row = torch.arange(len(kinds))[:, None, None] * (3 * entries.count + 1)
        return (codes + row).to(device)

    both = torch.stack([_chunk_entries(entries, C, causal, is_sin) for is_sin in (False, True)])
    chunk = of_heads(both[[int(kind == "sin") for kind in kinds]])
    levels = {}
    # Gradients flow against the states, with the conjugate of z; an unmasked REM has states from both sides.
    directions = [(False, False), (True, True)] if causal else list(itertools.product((False, True), repeat=2))
    for level, (first, M) in enumerate(zip(first_of_level, digits, strict=True)):
        i = torch.arange(M)
        for reverse, conjugate in directions:
            back = i.flip(0) if reverse else i  # steps from a state back to where the level is entered
            lags = back[:, None] - back - 1
            inside = entries.complex(torch.where(lags < 0, -1, lags + first), conjugate)
            handed_on = entries.complex(back.flip(0)[None] + first, conjugate)
            readout = entries.complex(back[:, None] + first, conjugate)
            carry = torch.cat([inside, handed_on])
            levels[level, reverse, conjugate] = _Level(of_heads(carry), of_heads(readout))
    doubled = {
        (i, conjugate): of_heads(entries.complex(torch.tensor([[first_doubled + i]]), conjugate))
        for i in range(doublings)
        for conjugate in (False, True)
    }
    return _Places(torch.tensor(exponents, device=device), chunk, levels, doubled)


def _chunk_entries(entries: _Entries, C: int, causal: bool, is_sin: bool) -> Tensor:
    """Indices of the entries of M, whose exponents 0 … C are the first of the table: [n, n]."""
    i = torch.arange(C)
    lags = i[:, None] - i
    lags = lags if causal else lags.abs()
    block = torch.where(lags > 0, entries.read(lags, is_sin), entries.zero)
    # The state enters row i as z^{i+1} h; sin heads read the imaginary part.
    readout = entries.complex(i[:, None] + 1)[C * is_sin : C * is_sin + C]
    write = entries.complex(i.flip(0)[None])[:, :C]
    step = entries.complex(torch.tensor([[C]]))
    if causal:
        return torch.cat([torch.cat([block, readout], 1), torch.cat([write, step], 1)])
    # The state from the right is C − i steps away from row i: the same entries, reversed.
    none = torch.full_like(step, entries.zero)
    top = torch.cat([block, readout, readout.flip(0)], 1)
    return torch.cat([top, torch.cat([write, step, none], 1), torch.cat([write.flip(1), none, step], 1)])


class Matrices:
    """The matrices of H heads for chunks of C steps.

    Args:
        rems: the heads; their dilations are ignored.
        chunk: C.
        digits: numbers of states per level (see `PlainLayout`).
        doublings: number of powers z^C, z^{2C}, z^{4C}, … (see `PackedLayout`).
        causal: masked or unmasked REMs.
        dtype: dtype of the matrices.
        derivatives: whether to compute the derivatives of M.

    Attributes:
        chunk: M, [H, n, n] with n = C + 2, for unmasked REMs C + 4.
        derivatives: ∂M/∂decay and, where a head is cyclical, ∂M/∂θ, [0, 1 or 2, H, n, n].
    """

    def __init__(
        self,
        rems: Rems,
        chunk: int,
        digits: tuple[int, ...],
        doublings: int,
        causal: bool,
        dtype: torch.dtype,
        derivatives: bool,
    ) -> None:
        self._places = _places(rems.kinds, chunk, digits, doublings, causal, rems.decay.device)
        real, imaginary = powers_table(rems, self._places.exponents, dtype, derivatives)
        table = torch.cat([real, imaginary, -imaginary, torch.zeros_like(real[..., :1])], dim=-1).flatten(1)
        matrices = table[:, self._places.chunk]
        self.chunk, self.derivatives = matrices[0], matrices[1:]
        self._table = table[0]
        self._picked: dict[int, Tensor] = {}

    def level(self, level: int, reverse: bool, conjugate: bool) -> tuple[Tensor, Tensor]:
        """Matrices that pass M states of a level on.

        Returns:
            From the terms to the states and, in the last two rows, to the next level, [H, 2·M + 2, 2·M]; and from the
            next level back to the states, [H, 2·M, 2].
        """
        places = self._places.levels[level, reverse, conjugate]
        return self._pick(places.carry), self._pick(places.readout)

    def doubled(self, times: int, conjugate: bool) -> Tensor:
        """z^{C·2^times}, acting on (real, imaginary): [H, 2, 2]."""
        return self._pick(self._places.doubled[times, conjugate])

    def _pick(self, places: Tensor) -> Tensor:
        if id(places) not in self._picked:
            self._picked[id(places)] = self._table[places]
        return self._picked[id(places)]


def powers_table(
    rems: Rems, exponents: Tensor, dtype: torch.dtype, derivatives: bool = False
) -> tuple[Tensor, Tensor]:
    """Re z^k and Im z^k of every head at whole exponents k ≥ 0.

    Computed in float64 (float32 on devices without it), whatever the dtype of the rates.

    Args:
        rems: the heads; their dilations are ignored.
        exponents: k, [K] or [H, K].
        dtype: dtype of the result.
        derivatives: whether to append ∂z^k/∂decay and, if a head is cyclical, ∂z^k/∂θ.

    Returns:
        [1, H, K] each, with derivatives [2 or 3, H, K].
    """
    device = exponents.device
    wide = widest_dtype(device)
    k = exponents.to(wide)
    decay = rems.decay.detach().to(wide)[:, None]
    cyclical = kinds_mask(rems.kinds, ("cos", "sin"), device)
    angle = torch.where(cyclical, rems.theta.detach().to(wide)[:, None], 0) * k
    cos, sin, modulus = torch.cos(angle), torch.sin(angle), decay**k
    real, imaginary = [modulus * cos], [modulus * sin]
    if derivatives:
        slope = k * decay ** (k - 1).clamp(min=0)
        real.append(slope * cos)
        imaginary.append(slope * sin)
        if set(rems.kinds) != {"regular"}:
            k = torch.where(cyclical, k, 0)
            real.append(-k * imaginary[0])
            imaginary.append(k * real[0])
    both = torch.stack([torch.stack(real), torch.stack(imaginary)])
    # Processors multiply subnormal numbers, in which long decays end, far more slowly: use 0 instead.
    limits = torch.finfo(dtype)
    both = torch.where(both.abs() < limits.tiny / limits.eps, 0, both).to(dtype)
    return both[0], both[1]


def kinds_mask(kinds: tuple[str, ...], which: tuple[str, ...], device: torch.device) -> Tensor:
    """Which heads are of certain kinds: [H, 1]."""
    # Cached, because a copy to a GPU waits for it; a graph has constants of its own.
    return (_mask if torch.compiler.is_compiling() else _cached_mask)(kinds, which, device)


def _mask(kinds: tuple[str, ...], which: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.tensor([kind in which for kind in kinds], device=device)[:, None]


_cached_mask = functools.lru_cache(maxsize=128)(_mask)


def weights_of_lags(rems: Rems, lags: Tensor, dtype: torch.dtype, derivatives: bool = False) -> Tensor:
    """f(τ) of every head, with its dilation, at lags τ of shape [K]; 0 where τ ≤ 0.

    Returns:
        Shape [1, H, K], or with derivatives [2 or 3, H, K]: f, ∂f/∂decay and, if a head is cyclical, ∂f/∂θ.
    """
    if max(rems.dilation) == 1:
        steps, reached = lags, lags > 0
    else:
        dilation = torch.tensor(rems.dilation, device=lags.device)[:, None]
        steps, reached = lags // dilation, (lags > 0) & (lags % dilation == 0)
    # Elsewhere the power is taken at 0 and dropped: at a negative lag it could be infinite.
    real, imaginary = powers_table(rems, torch.where(reached, steps, 0), dtype, derivatives)
    is_sin = kinds_mask(rems.kinds, ("sin",), lags.device)
    return torch.where(reached, torch.where(is_sin, imaginary, real), 0)
