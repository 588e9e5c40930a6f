"""`Problem`: what a layer of RSA heads computes, from its learned numbers to the mixed output, as one operation.

Notation: batch B, heads of the layer H, RSA heads R, value heads Hv, queries T, keys S, head size D.
"""

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask
from rsa_hf.rem import KINDS, Rems, constant, decay_rates, widest_dtype, working_dtype


class HeadRow(NamedTuple):
    """An RSA head, and the places of its numbers among the learned ones."""

    head: int  # its index among the heads of the layer
    kind: int  # in KINDS
    dilation: int
    gate_index: int  # place in `mu`
    rate_index: int  # place in `eta`, or for a cyclical head in `nu` and `theta`
    lags_index: int  # which group of K numbers in `free_lags`


@dataclass(frozen=True)
class Layout:
    """The RSA heads of a layer, ascending."""

    rows: tuple[HeadRow, ...]
    # `parameter_scale`, which multiplies `mu`, `eta`, `nu` and `theta`; 0: these are the gates, λ, γ and θ themselves
    # (`from_rems`).
    scale: float
    num_free_lags: int = 0  # K, of each head

    # Graphs must not use the cached properties: they cannot take the lock.
    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Index of each RSA head among the heads of the layer."""
        return tuple(row.head for row in self.rows)

    @cached_property
    def numbers(self) -> Tensor:
        """The rows, [R, 6], for the C++."""
        with torch.inference_mode(False):  # a later call may need them for a backward pass
            return torch.tensor(self.rows, device="cpu")

    def of_run(self, run: range) -> "Layout":
        """The RSA heads in a run of the layer's heads, with indices in the run."""
        rows = (row._replace(head=row.head - run.start) for row in self.rows if row.head in run)
        return Layout(tuple(rows), self.scale, self.num_free_lags)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_numbers(numbers: tuple[int, ...], scale: float, num_free_lags: int) -> "Layout":
        """The layout whose rows are given as one flat sequence."""
        width = len(HeadRow._fields)
        rows = (HeadRow(*numbers[i : i + width]) for i in range(0, len(numbers), width))
        return Layout(tuple(rows), scale, num_free_lags)


class Learned(NamedTuple):
    """The learned numbers of a layer, each one-dimensional, or None if no head has any (`rsa_hf/layer.py`)."""

    mu: Tensor | None
    eta: Tensor | None
    nu: Tensor | None
    theta: Tensor | None
    free_lags: Tensor | None


class Problem(NamedTuple):
    """P V of a layer's RSA heads, [B, R, T, D]; or, with `attention`, (1 − g) · attention + g · P V, [B, T, H, D]."""

    value: Tensor  # V, [B, Hv, S, D]
    attention: Tensor | None  # output of softmax attention to mix P V into, [B, T, H, D]
    learned: Learned  # without `mu` if there is no attention
    layout: Layout
    num_key_value_groups: int  # heads per value head; head h reads value head h // num_key_value_groups
    mask: AttentionMask

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors with respect to which the operation is differentiated."""
        return (self.value, self.attention, *self.learned)

    def empty_output(self) -> Tensor:
        """An empty tensor of the shape, dtype and layout of the output."""
        if self.attention is not None:
            return torch.empty_like(self.attention, memory_format=torch.contiguous_format)
        shape = (self.value.shape[0], len(self.layout.rows), self.mask.query_length, self.value.shape[3])
        return self.value.new_empty(shape, dtype=working_dtype(self.value))


def from_rems(
    value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None = None, gate: Tensor | None = None
) -> Problem:
    """The problem of REMs and gates that are given directly; gates have the shape (R,)."""
    rows = tuple(
        HeadRow(head, KINDS.index(kind), d, i, i, i)
        for i, (head, kind, d) in enumerate(zip(rems.heads, rems.kinds, rems.dilation, strict=True))
    )
    K = 0 if rems.free_lags is None else rems.free_lags.shape[1]
    free_lags = None if rems.free_lags is None else rems.free_lags.flatten()
    learned = Learned(gate, rems.decay, rems.decay, rems.theta, free_lags)
    return Problem(value, attention, learned, Layout(rows, 0.0, K), rems.num_key_value_groups, mask)


def rems_and_gate(learned: Learned, layout: Layout, num_key_value_groups: int) -> tuple[Rems, Tensor | None]:
    """The REMs and the gate of each head, (R,), in ordinary operations, in float64 where the device has it.

    float32 is too coarse near ±1: distinct parameters would give the same rate, and 1 − λ² no gradient for η. C++ and
    Triton compute the same from a `Problem`.
    """
    rows, scale = layout.rows, layout.scale
    some = next(tensor for tensor in (learned.eta, learned.nu) if tensor is not None)
    device, dtype = some.device, widest_dtype(some.device)

    def number(learned: Tensor | None) -> Tensor:
        wide = some.new_empty(0, dtype=dtype) if learned is None else learned.to(dtype)
        return wide * scale if scale else wide

    lam, gamma = number(learned.eta), number(learned.nu)
    if scale:
        lam, gamma = decay_rates(lam, gamma)
    regular = KINDS.index("regular")
    places = constant(tuple(row.rate_index + (row.kind != regular) * len(lam) for row in rows), device)
    decay = torch.cat([lam, gamma]).index_select(0, places)
    theta = torch.cat([torch.zeros_like(lam), number(learned.theta)]).index_select(0, places)
    gate = free_lags = None
    if learned.mu is not None:
        gates = torch.sigmoid(number(learned.mu)) if scale else number(learned.mu)
        gate = gates.index_select(0, constant(tuple(row.gate_index for row in rows), device))
        # Behind a shut gate too, P V must not overflow: 0 · inf would be NaN.
        decay = torch.where(gate.float() == 0, 0, decay) if scale else decay
    if learned.free_lags is not None:
        of_heads = learned.free_lags.view(-1, layout.num_free_lags)
        free_lags = of_heads.index_select(0, constant(tuple(row.lags_index for row in rows), device))
    kinds, dilation = tuple(KINDS[row.kind] for row in rows), tuple(row.dilation for row in rows)
    return Rems(kinds, decay, theta, dilation, num_key_value_groups, tuple(row.head for row in rows), free_lags), gate
