r"""The elementwise recurrence of SRU and SRU++ (Lei et al., 2018, arXiv:1709.02755; Lei, 2021).

With U = [U⁰; U¹; U²] and the layer's input x, in each channel on its own:

    f[t] = σ(U⁰[t] + v ⊙ c[t−1] + b)                    forget gate
    r[t] = σ(U¹[t] + v′ ⊙ c[t−1] + b′)                  highway gate
    c[t] = f[t] ⊙ c[t−1] + (1 − f[t]) ⊙ U²[t]           cell
    h[t] = r[t] ⊙ c[t] + (1 − r[t]) ⊙ x[t]              output

The forget gate looks at the cell before, so c[t] is no linear function of c[t−1] and no parallel scan gives it: the
cells are computed step by step, in time linear in T, with three operations on [B, d] a step. All else is computed for
the whole segment at once. The gradient is a linear recurrence, two operations a step, as every f[t] is known by then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rsa_hf.ops.types import working_dtype

__all__ = ["cells", "elementwise_recurrence"]


class _Cells(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forget: Tensor, candidate: Tensor, weight: Tensor, first: Tensor) -> Tensor:
        cell, found = first, []
        for forget_t, candidate_t in zip(forget.unbind(1), candidate.unbind(1), strict=True):
            cell = torch.lerp(candidate_t, cell, torch.sigmoid(torch.addcmul(forget_t, weight, cell)))
            found.append(cell)
        stacked = torch.stack(found, dim=1)
        ctx.save_for_backward(forget, candidate, weight, first, stacked)
        return stacked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        forget, candidate, weight, first, found = ctx.saved_tensors
        before = _shifted(first, found)
        f = torch.sigmoid(forget + weight * before)
        by_gate = (before - candidate) * f * (1 - f)  # ∂c[t] / ∂(argument of f[t])
        by_before = f + by_gate * weight  # ∂c[t] / ∂c[t−1]
        carried, totals = torch.zeros_like(first), []
        for gradient_t, by_before_t in zip(gradient.unbind(1)[::-1], by_before.unbind(1)[::-1], strict=True):
            total = gradient_t + carried
            carried = by_before_t * total
            totals.append(total)
        total = torch.stack(totals[::-1], dim=1)
        to_forget = total * by_gate
        return to_forget, total * (1 - f), (to_forget * before).sum((0, 1)), carried


def _shifted(first: Tensor, found: Tensor) -> Tensor:
    """The cell before each step: c[−1], c[0], …, c[T−2]."""
    return torch.cat([first[:, None], found[:, :-1]], dim=1)


def cells(forget: Tensor, candidate: Tensor, weight: Tensor, first: Tensor) -> Tensor:
    """All c[t] = f[t] ⊙ c[t−1] + (1 − f[t]) ⊙ candidate[t], f[t] = σ(forget[t] + weight ⊙ c[t−1]).

    Args:
        forget: U⁰ + b, shape [B, T, d], T ≥ 1; ∞ where the cell is to stay as it is.
        candidate: U², [B, T, d].
        weight: v, [d].
        first: c[−1], [B, d].

    Returns:
        Shape [B, T, d]. Differentiable once.
    """
    found: Tensor = _Cells.apply(forget, candidate, weight, first)  # type: ignore[no-untyped-call]
    return found


def elementwise_recurrence(
    U: Tensor,
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    first: Tensor | None = None,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs of a layer and its last cell; computed in float32 or better.

    Args:
        U: [U⁰; U¹; U²], shape [B, T, 3d].
        x: the layer's input, [B, T, d].
        weights: v and v′, [d] each.
        biases: b and b′, [d] each.
        first: the cell before the segment, [B, d]; None: zeros.
        real: [B, T], False for padding, which the cell passes over as if it were not there; None: all is real.

    Returns:
        The outputs h, [B, T, d] in the dtype of x, and the cell behind the segment, [B, d].
    """
    dtype = working_dtype(x)
    forget, highway, candidate = U.to(dtype).chunk(3, dim=-1)
    (v_f, v_r), (b_f, b_r) = (w.to(dtype) for w in weights), (b.to(dtype) for b in biases)
    first = x.new_zeros(x.shape[0], x.shape[2], dtype=dtype) if first is None else first
    forget = forget + b_f
    if real is not None:
        forget = forget.masked_fill(~real[..., None], torch.inf)
    found = cells(forget, candidate, v_f, first)
    r = torch.sigmoid(highway + b_r + v_r * _shifted(first, found))
    return torch.lerp(x.to(dtype), found, r).to(x.dtype), found[:, -1]
