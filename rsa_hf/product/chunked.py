r"""P V in linear time and memory: a scan over chunks of C steps, in plain PyTorch (spec §5).

With the complex rate z of a head (λ, or γ e^{iθ}), Σ_{j≥1} z^j v_{t−j} is a scalar linear recurrence. Let

    h_n = Σ_{s < nC} z^{nC−1−s} v_s          the state that reaches chunk n.

Then, for row i = 0 … C−1 of chunk n,

    y_i = Σ_{j<i} z^{i−j} v_j  +  z^{i+1} h_n        a C×C Toeplitz block, and the state read out;
    h_{n+1} = z^C h_n + Σ_i z^{C−1−i} v_i            the state carried on.

Regular and cos heads are the real part of y, sin heads the imaginary part. States are kept as (real, imaginary)
rows, so all products are real. The recurrence over n is the same scan at rate z^C; it is run on chunks again.

A head dilated by d is its base head on d interleaved sub-sequences: [S, D] seen as [S/d, d·D]. Keys before the first
query (a cache, a memory) only enter through the state h_0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["chunked_product"]

CHUNK = 64  # steps per chunk: large enough for matrix products to pay, small enough for C² work not to


def chunked_product(
    value: Tensor,
    kinds: Sequence[str],
    decay: Tensor,
    theta: Tensor,
    dilation: Sequence[int],
    query_length: int,
    query_offset: int,
    causal: bool,
) -> Tensor:
    """P V of the same arguments as `dense_product`, without `visible`; unmasked REMs need T = S.

    Args:
        value: shape [B, H, S, D].
        kinds: of length H.
        decay: λ or γ, shape (H,).
        theta: shape (H,).
        dilation: of length H.
        query_length: T.
        query_offset: position of the first query on the key axis.
        causal: masked or unmasked REMs.

    Returns:
        Shape [B, H, T, D], in the dtype of `value`.
    """
    if query_length == 0:
        return value[:, :, :0]
    # A causal query sees no key behind the last query: a static cache has such slots, still empty.
    value = value[:, :, : query_offset + query_length]
    order: list[int] = []
    outputs = []
    for d in sorted(set(dilation)):
        heads = [h for h in range(len(kinds)) if dilation[h] == d]
        index = torch.tensor(heads, device=value.device)
        whole = len(heads) == len(kinds)
        group = value if whole else value.index_select(1, index)
        z = _Rate(
            decay if whole else decay.index_select(0, index),
            theta if whole else theta.index_select(0, index),
            [kinds[h] for h in heads],
            value.dtype,
        )
        output = _causal_product(group, z, d, query_offset)
        if not causal:
            output = output + _causal_product(group.flip(2), z, d, 0).flip(2)
        outputs.append(output)
        order += heads
    if order == sorted(order):
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    position = torch.tensor(order, device=value.device).argsort()
    return torch.cat(outputs, dim=1).index_select(1, position)


class _Rate:
    """The complex rates z of H heads and tables of their powers, in float64 where the device has it."""

    def __init__(self, decay: Tensor, theta: Tensor, kinds: Sequence[str], dtype: torch.dtype) -> None:
        wide = torch.float32 if decay.device.type == "mps" else torch.float64
        cyclical = torch.tensor([kind != "regular" for kind in kinds], device=decay.device)
        self.decay = decay.to(wide)[:, None]
        self.theta = torch.where(cyclical, theta.to(wide), torch.zeros((), dtype=wide, device=theta.device))[:, None]
        self.is_sin = torch.tensor([kind == "sin" for kind in kinds], device=decay.device)
        self.dtype = dtype

    def powers(self, exponents: Tensor) -> tuple[Tensor, Tensor]:
        """Re z^j and Im z^j at the given exponents j ≥ 0, each of shape [H, *exponents.shape]."""
        steps = exponents.reshape(1, -1).to(self.decay.dtype)
        modulus, angle = self.decay**steps, self.theta * steps
        shape = (self.decay.shape[0], *exponents.shape)
        real, imaginary = modulus * torch.cos(angle), modulus * torch.sin(angle)
        return real.reshape(shape).to(self.dtype), imaginary.reshape(shape).to(self.dtype)

    def read(self, exponents: Tensor) -> Tensor:
        """F at the given exponents ≥ 1: the real part of z^j, the imaginary part for sin heads."""
        real, imaginary = self.powers(exponents)
        return torch.where(self.is_sin.reshape(-1, *[1] * exponents.dim()), imaginary, real)


def _causal_product(value: Tensor, z: _Rate, d: int, prefix: int) -> Tensor:
    """Masked P V of heads that share a dilation d; the first `prefix` of the S keys precede the queries."""
    B, H, S, D = value.shape
    T = S - prefix
    # Left padding keeps query t in sub-sequence t mod d, right padding fills the last step.
    left, right = -prefix % d, -T % d
    if left or right:
        value = F.pad(value, (0, 0, left, right))
    steps = value.reshape(B, H, -1, d * D)
    before, steps = steps[:, :, : (prefix + left) // d], steps[:, :, (prefix + left) // d :]
    n = steps.shape[2]
    C = min(CHUNK, n)
    steps = F.pad(steps, (0, 0, 0, -n % C)).reshape(B, H, -1, C, d * D)

    i = torch.arange(C, device=value.device)
    lags = i[:, None] - i[None, :]
    block = torch.where(lags > 0, z.read(lags.clamp(min=1)), torch.zeros((), dtype=z.dtype, device=value.device))
    output = block[:, None] @ steps
    if steps.shape[2] > 1 or before.shape[2]:
        states = _chunk_states(before, steps, z, C)
        real, imaginary = z.powers(i + 1)
        is_sin = z.is_sin[:, None]
        readout = torch.stack(
            [torch.where(is_sin, imaginary, real), torch.where(is_sin, real, -imaginary)], dim=-1
        )  # [H, C, 2]: Re z^{i+1}h, or Im z^{i+1}h for sin heads
        output = output + readout[:, None] @ states
    return output.reshape(B, H, -1, D)[:, :, :T]


def _chunk_states(before: Tensor, steps: Tensor, z: _Rate, C: int) -> Tensor:
    """h_n for every chunk n = 0 … N−1, as (real, imaginary) rows: [B, H, N, 2, dD]."""
    summaries = _state_of(steps[:, :, :-1], z, C)  # chunk n feeds state n + 1
    first = _state_of(before.unsqueeze(2), z, before.shape[2])
    return _carry(torch.cat([first, summaries], dim=2), z, C)


def _state_of(steps: Tensor, z: _Rate, length: int) -> Tensor:
    """Σ_i z^{length−1−i} v_i over the steps of each chunk: [B, H, N, length, W] to [B, H, N, 2, W]."""
    weights = torch.stack(z.powers(torch.arange(length - 1, -1, -1, device=steps.device)), dim=1)  # [H, 2, length]
    return weights[:, None] @ steps


def _carry(terms: Tensor, z: _Rate, step: int) -> Tensor:
    """x_n + z^step x_{n−1} + z^{2·step} x_{n−2} + …, for complex terms x: [B, H, N, 2, W], the same shape back."""
    B, H, N, _, W = terms.shape
    if N == 1:
        return terms
    M = min(CHUNK, N)
    chunks = F.pad(terms, (0, 0, 0, 0, 0, -N % M)).reshape(B, H, -1, 2 * M, W)
    i = torch.arange(M, device=terms.device)
    carried = _complex_toeplitz(z, i[:, None] - i[None, :], step)[:, None] @ chunks
    if chunks.shape[2] > 1:
        # The last row of a chunk of states is what the next chunk of states starts from.
        last = carried[:, :, :-1, -2:]
        entering = F.pad(_carry(last, z, step * M), (0, 0, 0, 0, 1, 0))
        carried = carried + _complex_toeplitz(z, i[:, None] + 1, step)[:, None] @ entering
    return carried.reshape(B, H, -1, 2, W)[:, :, :N]


def _complex_toeplitz(z: _Rate, exponents: Tensor, step: int) -> Tensor:
    """z^{step·exponent}, 0 at exponents < 0, as a real matrix acting on interleaved (real, imaginary) rows."""
    real, imaginary = z.powers(exponents.clamp(min=0) * step)
    zero = torch.zeros((), dtype=z.dtype, device=real.device)
    real, imaginary = torch.where(exponents >= 0, real, zero), torch.where(exponents >= 0, imaginary, zero)
    rows, columns = exponents.shape
    blocks = torch.stack([real, -imaginary, imaginary, real], dim=-1).reshape(-1, rows, columns, 2, 2)
    return blocks.transpose(2, 3).reshape(-1, 2 * rows, 2 * columns)
