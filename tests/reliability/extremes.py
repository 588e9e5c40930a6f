"""P V with extreme numbers, its exact result, and the error allowed: a double loop in float64, run twice.

The second run sums magnitudes (|λ|, |v|, and 1 for cosines). The error allowed is a few roundings of that sum,
whatever cancels in the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mpmath
import torch
from hypothesis import strategies as st
from torch import Tensor

from references import double_loop
from rsa_hf import RSAConfig, rem_product

# A layer with every kind of head; the last ones are dilated. LAYER_PAIRS has the ν and θ of each head with tied pairs.
LAYER = RSAConfig(
    num_regular=2,
    num_cyclical_pairs=1,
    num_dilated_regular=1,
    num_dilated_cyclical_pairs=1,
    dilation=[2, 3, 40],
    gate_init=0.5,
)
LAYER_KINDS = ("regular", "regular", "cos", "sin", "regular", "cos", "sin")
LAYER_DILATION = (1, 1, 1, 1, 2, 3, 40)
LAYER_PAIRS = (None, None, 0, 0, None, 1, 1)

KINDS = ("regular", "cos", "sin")
NEAR_ONE = 1 - 1e-7
RATES = (NEAR_ONE, 1.0, 0.0, 1e-30, 1e-38, 0.5, 0.93)
ANGLES = (0.0, math.pi, 1e-30, 2.0, -1e4, 1e9, 1e30)
LENGTHS = (1, 2, 3, 7, 16, 17, 33, 35)
MASKS = ("none", "padding", "all padding", "single tokens", "documents", "window 1", "window", "any", "poison")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = ("subnormal", "one", "largest")


@dataclass(repr=False)
class Problem:
    """Arguments of P V. The mask is given as keywords of `rem_product` and as `visible`, [B, 1, T, S]."""

    value: Tensor
    kinds: tuple[str, ...]
    decay: Tensor
    theta: Tensor
    dilation: tuple[int, ...]
    groups: int
    T: int
    causal: bool
    masks: dict[str, Tensor | int]
    visible: Tensor
    weights: Tensor

    def __repr__(self) -> str:
        rates = f"{self.kinds}, {self.decay.tolist()}, {self.theta.tolist()}, {self.dilation}, groups={self.groups}"
        largest = float(self.value.nan_to_num().abs().max()) if self.value.numel() else 0.0
        values = f"{tuple(self.value.shape)} {self.value.dtype} up to {largest:.3g}"
        return f"Problem({values}, {rates}, T={self.T}, causal={self.causal}, {list(self.masks)})"

    @property
    def working(self) -> torch.dtype:
        return torch.float64 if self.value.dtype == torch.float64 else torch.float32


@st.composite
def problems(draw, dtypes=DTYPES, lengths=LENGTHS, masks=MASKS, batches=(0, 1, 2), causal=None, queries=None):
    """Draw any combination of the extremes above."""
    T = draw(st.sampled_from(lengths)) if queries is None else queries
    S = T + draw(st.sampled_from((0, 0, 1, 19)))
    B, D, groups = draw(st.sampled_from(batches)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    dtype, size = draw(st.sampled_from(dtypes)), draw(st.sampled_from(SIZES))
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)))
    signs = [draw(st.sampled_from((-1, 1))) if kind == "regular" else 1 for kind in kinds]
    decay = torch.tensor([sign * draw(st.sampled_from(RATES)) for sign in signs])
    decay = decay.double() if dtype == torch.float64 else decay  # so that its gradient has the range of the values
    theta = torch.tensor([draw(st.sampled_from(ANGLES)) for _ in kinds]).to(decay)
    dilation = tuple(draw(st.sampled_from((1, 1, 2, 5, 40, 1000))) for _ in kinds)
    causal = draw(st.booleans()) if causal is None else causal
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shape = (B, -(-len(kinds) // groups), S, D)
    value = _values(shape, dtype, size, generator)
    kind = draw(st.sampled_from(masks))
    keywords, visible = _masks(kind, B, T, S, causal, generator)
    if kind == "poison":
        value = torch.where(keywords["key_mask"][:, None, :, None], value, math.nan)
    weights = torch.randn(B, len(kinds), T, D, dtype=torch.float64, generator=generator)
    if size == "largest" and dtype != torch.float16:
        weights = weights / max(B * D * T * S, 1) / 16  # so that gradients of the rates stay in range
    return Problem(value, kinds, decay, theta, dilation, groups, T, causal, keywords, visible, weights)


def _values(shape: tuple[int, ...], dtype: torch.dtype, size: str, generator: torch.Generator) -> Tensor:
    limits, values = torch.finfo(dtype), torch.rand(shape, dtype=torch.float64, generator=generator) * 2 - 1
    if size == "subnormal":
        values = values * limits.tiny / 2
    elif size == "largest":
        # A sum must stay in the range of the dtype that it is computed in: float32 for float16, for the other dtypes
        # one with their own range. The reference sums float64 in float64.
        most = limits.max**0.5 if dtype == torch.float64 else limits.max
        values = values * most / (1 if dtype == torch.float16 else 2 * max(shape[2], 1))
    return values.to(dtype)


def _masks(kind: str, B: int, T: int, S: int, causal: bool, generator: torch.Generator):
    """Keywords of `rem_product`, and which keys each query sees, [B, 1, T, S]."""
    lags = (S - T + torch.arange(T))[:, None] - torch.arange(S)
    visible = torch.ones(B, 1, T, S, dtype=torch.bool)
    if kind in ("padding", "all padding", "poison"):
        keys = torch.rand(B, S, generator=generator) < (0.0 if kind == "all padding" else 0.6)
        return {"key_mask": keys}, visible & keys[:, None, None]
    if kind in ("single tokens", "documents"):
        ends = torch.rand(B, S, generator=generator) < (2.0 if kind == "single tokens" else 0.3)
        numbers = ends.cumsum(1)
        same = numbers[:, None, S - T :, None] == numbers[:, None, None]
        return {"documents": numbers}, visible & same
    if kind in ("window", "window 1"):
        window = 1 if kind == "window 1" else 4
        return {"window": window}, visible & (lags.abs() < window)
    if kind == "any":
        shown = torch.rand(B, 1, T, S, generator=generator) < 0.5
        return {"visible": shown}, shown
    return {}, visible


NAMES = ("P V", "dV", "d decay", "d theta")


def reference(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """P V and its gradients of V, rates and angles, and the same of the magnitudes, in float64."""
    angles = torch.tensor([first_turn(angle) for angle in problem.theta.tolist()], dtype=torch.float64)
    value = torch.nan_to_num(problem.value.double(), nan=0.0)
    decay, weights, regular = problem.decay.double(), problem.weights, ("regular",) * len(problem.kinds)
    exact = _looped(problem, value, problem.kinds, decay, angles, weights)
    magnitudes = _looped(problem, value.abs(), regular, decay.abs(), angles, weights.abs())
    magnitudes[3] = magnitudes[2]  # |∂/∂θ| ≤ Σ τ |ρ|^τ |v| ≤ |∂/∂ρ|
    return exact, magnitudes


def _looped(problem, value, kinds, decay, theta, weights):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (value, decay, theta)]
    keys = leaves[0].repeat_interleave(problem.groups, 1)[:, : len(kinds)]
    S, T = value.shape[2], problem.T
    output = double_loop(keys, kinds, *leaves[1:], problem.dilation, T, S - T, problem.causal, problem.visible)
    output = output + 0 * sum(leaf.sum() for leaf in leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights)]


def first_turn(angle: float) -> float:
    """The angle modulo 2π, with as many digits of π as it takes."""
    with mpmath.workdps(80):
        return float(mpmath.fmod(mpmath.mpf(angle), 2 * mpmath.pi))


def differentiated(problem: Problem) -> list[Tensor]:
    """P V by `rem_product`, and its gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (problem.value, problem.decay, problem.theta)]
    keywords = {"query_length": problem.T, "causal": problem.causal, "groups": problem.groups, **problem.masks}
    output = rem_product(leaves[0], problem.kinds, *leaves[1:], problem.dilation, **keywords)
    weights = problem.weights.to(output.dtype)
    gradients = torch.autograd.grad(output, leaves, weights, allow_unused=True, materialize_grads=True)
    return [output.detach(), *gradients]


def assert_right(problem: Problem, found: list[Tensor], roundings: float = 64, floor: float = 0.0) -> None:
    """Check that results are finite, and off by no more than some roundings of the magnitudes.

    Args:
        problem: the arguments.
        found: P V, and the gradients if there are any.
        roundings: the number of roundings of the dtype that is computed in.
        floor: the error allowed in a weight of P.
    """
    limits = torch.finfo(problem.working)
    exact, magnitudes = reference(problem)
    # Weights that are nearly subnormal count as 0.
    cut = limits.tiny / limits.eps + floor
    values, given = (float(x.nan_to_num().double().abs().sum()) for x in (problem.value, problem.weights))
    steps = problem.value.shape[2] ** 2
    spacing = limits.tiny * limits.eps * (1 + steps * problem.value.numel())  # of subnormal numbers
    smallest = [cut * size + spacing for size in (values, given, steps * values * given, steps * values * given)]
    for name, mine, right, size, least in zip(NAMES, found, exact, magnitudes, smallest, strict=False):
        assert mine.shape == right.shape, name
        assert bool(mine.isfinite().all()), f"{name} is not finite"
        stored = torch.finfo(mine.dtype)
        allowed = roundings * limits.eps * size + least + stored.eps * right.abs() + stored.tiny * stored.eps
        off = (mine.double() - right).abs() / allowed
        assert off.numel() == 0 or float(off.max()) <= 1, (
            f"{name} is off by {float(off.max()):.3g} times what is allowed"
        )
