r"""P V in linear time and memory: a scan over chunks of C steps, in plain PyTorch.

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

    def weights_of_state(self, length: int) -> Tensor:
        """z^{length−1−i} for i = 0 … length−1, as rows (real, imaginary): what a state keeps; [H, 2, length]."""
        return torch.stack(self.powers(torch.arange(length - 1, -1, -1, device=self.decay.device)), dim=1)

    def readout(self, exponents: Tensor) -> Tensor:
        """What a head reads of z^j h: the real part, for sin heads the imaginary part; [H, len(exponents), 2]."""
        real, imaginary = self.powers(exponents)
        is_sin = self.is_sin[:, None]
        columns = [torch.where(is_sin, imaginary, real), torch.where(is_sin, real, -imaginary)]
        return torch.stack(columns, dim=-1)

    def matrix(self, exponents: Tensor, step: int) -> Tensor:
        """z^{step·exponent}, 0 at exponents < 0, acting on stacked (real, imaginary) rows: [H, 2·rows, 2·columns]."""
        zero = torch.zeros((), dtype=self.dtype, device=self.decay.device)
        powers = self.powers(exponents.clamp(min=0) * step)
        real, imaginary = (torch.where(exponents >= 0, part, zero) for part in powers)
        return torch.cat([torch.cat([real, -imaginary], dim=-1), torch.cat([imaginary, real], dim=-1)], dim=-2)


def _causal_product(value: Tensor, z: _Rate, d: int, prefix: int) -> Tensor:
    """Masked P V of heads that share a dilation d; the first `prefix` of the S keys precede the queries."""
    B, H, S, D = value.shape
    T = S - prefix
    # Left padding keeps query t in sub-sequence t mod d, right padding fills the last step.
    left, right = -prefix % d, -T % d
    if left or right:
        value = F.pad(value, (0, 0, left, right))
    W = d * D
    steps = value.reshape(B, H, -1, W)
    before, steps = steps[:, :, : (prefix + left) // d], steps[:, :, (prefix + left) // d :]
    n = steps.shape[2]
    C = min(CHUNK, n)
    if n % C:
        steps = F.pad(steps, (0, 0, 0, -n % C))
    N = steps.shape[2] // C
    # Everything that shares a head's matrices becomes columns, so that each product is one matrix product a head.
    columns = steps.reshape(B, H, N, C, W).permute(1, 3, 2, 0, 4).reshape(H, C, N * B * W)

    i = torch.arange(C, device=value.device)
    lags = i[:, None] - i[None, :]
    block = torch.where(lags > 0, z.read(lags.clamp(min=1)), torch.zeros((), dtype=z.dtype, device=value.device))
    if N == 1 and before.shape[2] == 0:
        output = block @ columns
    else:
        products = torch.cat([block, z.weights_of_state(C)], dim=1) @ columns
        summaries = products[:, C:].reshape(H, 2, N, B * W)[:, :, :-1]  # chunk n feeds state n + 1
        old = before.permute(1, 2, 0, 3).reshape(H, -1, B * W)
        first = (z.weights_of_state(before.shape[2]) @ old)[:, :, None]
        states = _carry(torch.cat([first, summaries], dim=2), z, C).reshape(H, 2, N * B * W)
        output = torch.baddbmm(products[:, :C], z.readout(i + 1), states)
    output = output.reshape(H, C, N, B, W).permute(3, 0, 2, 1, 4)
    return output.reshape(B, H, N * C * d, D)[:, :, :T]


def _carry(terms: Tensor, z: _Rate, step: int) -> Tensor:
    """x_n + z^step x_{n−1} + z^{2·step} x_{n−2} + …, for complex terms x: [H, 2, N, W], the same shape back."""
    H, _, N, W = terms.shape
    if N == 1:
        return terms
    M = min(CHUNK, N)
    chunks = F.pad(terms, (0, 0, 0, -N % M)).reshape(H, 2, -1, M, W).transpose(2, 3)  # [H, 2, M, N / M, W]
    outer = chunks.shape[3]
    i = torch.arange(M, device=terms.device)
    carried = (z.matrix(i[:, None] - i[None, :], step) @ chunks.reshape(H, 2 * M, -1)).reshape(H, 2, M, outer, W)
    if outer > 1:
        # What the last state of a chunk of states holds enters the next chunk.
        entering = F.pad(_carry(carried[:, :, -1, :-1], z, step * M), (0, 0, 1, 0))
        added = z.matrix(i[:, None] + 1, step) @ entering.reshape(H, 2, -1)
        carried = carried + added.reshape(H, 2, M, outer, W)
    return carried.transpose(2, 3).reshape(H, 2, outer * M, W)[:, :, :N]
