"""P V of one query after cached keys: a weighted sum of values, without chunks, gradients or waiting for a device.

The weights f(τ) are kept from step to step, as far back as they matter: with |z| ≤ ρ, everything more than L steps
back adds at most ρ^L / (1 − ρ) times the largest value.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsa_hf.ops.autograd import choose_backend
from rsa_hf.ops.cpp.step import CppStep
from rsa_hf.ops.mask import AttentionMask, boolean_mask
from rsa_hf.ops.problem import Problem, rems_and_gate
from rsa_hf.rem import Rems, constant, is_recorded, is_transformed, mix, take_heads, weights_of_lags, working_dtype

NEGLIGIBLE = 2.0**-30  # of the largest value, in P V: below what float32 resolves


class _Kept(NamedTuple):
    call: tuple[Any, ...]
    parameters: list[tuple[str, nn.Parameter, int, Any, Any]]  # as `_states` gives them
    rems: Rems
    gate: Tensor
    table: LagTable
    step: CppStep | None  # where it can run


class DecodingCache:
    """What one step of generation leaves for the next: the REMs, the gates and the weights of all lags of a layer.

    Computed again when a parameter changes, another kind of call comes, or the keys outgrow the table. On a CPU a
    parameter changes with its bytes. A GPU would have to be waited for, so a parameter changes there when it is
    replaced or written to in place, and weights are kept only while each step has one key more than the one before.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.kept: _Kept | None = None
        self.last_length = 0  # S of the step before

    def compiled_step(self, layer: nn.Module, attention: Tensor, value: Tensor, mask: AttentionMask) -> Tensor | None:
        """`step` in one call of the C++, with few checks; None where it cannot be."""
        kept = self.kept
        if kept is None or kept.step is None or is_recorded() or torch.is_grad_enabled() or is_transformed():
            return None
        if not kept.step.fits(attention, value, mask) or not _is_valid(kept, layer, attention, value):
            return None
        return kept.step(attention, value, mask)

    def step(
        self,
        layer: nn.Module,
        problem: Problem,
    ) -> Tensor:
        """Equation 4 for a single query after cached keys, [B, 1, H, D].

        Args:
            layer: owner of the parameters.
            problem: that of a single causal query, with attention.
        """
        value, attention, learned, layout, num_key_value_groups, mask = problem
        assert attention is not None
        if is_recorded() or not self._may_keep(value):
            rems, gate = rems_and_gate(learned, layout, num_key_value_groups)
            assert gate is not None
            return mix(attention, decode(value, rems, mask, None), gate, rems.heads)
        kept = self.kept
        if kept is None or not _is_valid(kept, layer, attention, value):
            rems, gate = rems_and_gate(learned, layout, num_key_value_groups)
            assert gate is not None
            gate = gate.to(working_dtype(value))
            # Twice the length, so that a growing cache does not need a new table at each step.
            table, step = LagTable(rems, gate.dtype, 2 * value.shape[2]), None
            if choose_backend(problem) == "cpp":
                step = CppStep(table.weights, table.reach, rems, gate)
            kept = _Kept(_kind_of_call(attention, value), _states(layer), rems, gate, table, step)
            self.kept = kept if kept.parameters else None
        if kept.step is not None and not torch.is_grad_enabled() and kept.step.fits(attention, value, mask):
            return kept.step(attention, value, mask)
        return mix(attention, decode(value, kept.rems, mask, kept.table), kept.gate, kept.rems.heads)

    def _may_keep(self, value: Tensor) -> bool:
        """Whether weights may be kept: on a CPU always, else if this step has one key more than the one before."""
        is_next = value.shape[2] == self.last_length + 1
        if not is_next and not value.is_cpu:
            self.reset()
        self.last_length = value.shape[2]
        return is_next or value.is_cpu


def _kind_of_call(attention: Tensor, value: Tensor) -> tuple[Any, ...]:
    # Tensors made under inference_mode cannot be part of a graph later.
    return attention.shape[2], value.shape[1], value.dtype, value.device, torch.is_inference_mode_enabled()


def _is_valid(kept: _Kept, layer: nn.Module, attention: Tensor, value: Tensor) -> bool:
    """Whether no parameter has changed since, and the table is long enough."""
    if layer._modules or kept.call != _kind_of_call(attention, value) or kept.table.longest < value.shape[2]:
        return False  # a child is torch's parametrize, which has taken a parameter
    for name, parameter, address, memory, before in kept.parameters:
        if layer._parameters[name] is not parameter or parameter.data_ptr() != address:
            return False
        if before != (parameter._version if memory is None else memory.tobytes()):
            return False
    return True


def _states(layer: nn.Module) -> list[tuple[str, nn.Parameter, int, Any, Any]]:
    """Each name, parameter, address and, on a CPU, memory and the bytes there, elsewhere None and version.

    Empty if they cannot tell whether one changes.
    """
    states = []
    for name, p in layer._parameters.items():
        if p is None:
            continue
        is_read = p.is_cpu and p.is_contiguous() and type(p) is nn.Parameter
        memory = p.detach().view(torch.uint8).numpy() if is_read else None
        # Under parametrize the parameters are in a child module, and inference tensors have no version.
        if layer._modules or (memory is None and (p.is_cpu or p.is_inference())):
            return []
        states.append((name, p, p.data_ptr(), memory, p._version if memory is None else memory.tobytes()))
    return states


class LagTable:
    """f(τ) of every head at the lags 0 … L beyond which nothing matters: [H, L + 1], and its mirror image.

    `weights` has a 0 for lag L + 1, which stands for all longer ones; `reach` says the last lag of each head.

    Args:
        rems: the heads; the table is valid for these rates only.
        dtype: dtype of the table.
        longest: a lag that no query exceeds.
    """

    def __init__(self, rems: Rems, dtype: torch.dtype, longest: int) -> None:
        reach = _reach(rems)
        self.longest = math.inf if max(reach) <= longest else longest
        self.reach = [min(lag, longest) for lag in reach]
        weights = weights_of_lags(rems, torch.arange(max(self.reach) + 1, device=rems.decay.device), dtype)
        self.weights, self.newest_last = F.pad(weights, (0, 1)), weights.flip(-1).contiguous()


def decode(value: Tensor, rems: Rems, mask: AttentionMask, table: LagTable | None) -> Tensor:
    """P V of the only query: [B, H, 1, D], in the dtype it is computed in.

    Args:
        value: V, [B, Hv, S, D].
        rems: the heads.
        mask: mask of a single causal query.
        table: the weights of these heads; None computes those of all S lags.
    """
    device, dtype = value.device, working_dtype(value)
    if mask.visible is None and mask.key_mask is None:
        # The position of the query is known, so the keys within reach are a slice.
        end = mask.query_offset + 1
        if table is None:
            weights = weights_of_lags(rems, torch.arange(end - 1, -1, -1, device=device), dtype)
        else:
            weights = table.newest_last
        seen = min(weights.shape[1], end, mask.sliding_window or end)
        if seen < weights.shape[1]:
            weights = weights[:, -seen:]
        return _weighted_sum(weights[None], value.narrow(2, end - seen, seen), rems)
    position = mask.query_offset if mask.query_position is None else mask.query_position
    tau = position - torch.arange(value.shape[2], device=device)
    if table is None:
        weights = weights_of_lags(rems, tau, dtype)
    else:
        weights = table.weights.index_select(1, tau.clamp(0, table.weights.shape[1] - 1))
    # f is 0 for keys after the query, so a mask that contains the position needs nothing but its row.
    visible = boolean_mask(mask, tau[None]) if mask.query_position is None else mask.visible
    assert visible is not None
    of_heads = take_heads(visible, rems.heads, dim=1) if visible.shape[1] > 1 else visible
    return _weighted_sum((weights * of_heads[:, :, 0]).expand(len(value), -1, -1), value, rems)


def _weighted_sum(weights: Tensor, value: Tensor, rems: Rems) -> Tensor:
    """Σ_s w_s v_s for weights [B or 1, H, S] and values [B, Hv, S, D]: [B, H, 1, D]."""
    # Heads that share a value head are the rows of one matrix product, plain heads among them zeros: V is read in
    # place. (`matmul` takes longer to bring its arguments to this form than `bmm` takes to multiply.)
    shared = rems.num_key_value_groups
    first, last = rems.heads[0] // shared, rems.heads[-1] // shared
    rows = tuple(head - first * shared for head in rems.heads)
    num_values = last + 1 - first
    if len(rows) < num_values * shared:
        padded = weights.new_zeros(len(weights), num_values * shared, weights.shape[2])
        weights = padded.index_copy(1, constant(rows, weights.device), weights)
    if num_values < value.shape[1]:
        value = value.narrow(1, first, num_values)
    B, _, S, D = value.shape
    matrices = weights.expand(B, -1, -1).reshape(B * num_values, shared, S)
    columns = value.to(weights.dtype).reshape(B * num_values, S, D)
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if compiled and value.dtype != weights.dtype:
        # One kernel, which reads V as it is; for `bmm` the compiler would write a copy in the dtype of the weights.
        sums = (matrices[..., None] * columns[:, None]).sum(2)
    elif torch.is_autocast_enabled(value.device.type):
        with torch.autocast(value.device.type, enabled=False):  # it would multiply in half precision
            sums = torch.bmm(matrices, columns)
    else:
        sums = torch.bmm(matrices, columns)
    return take_heads(sums.view(B, num_values * shared, 1, D), rows, dim=1)


def _reach(rems: Rems) -> list[int]:
    """For each head the lag beyond which everything that it reads is negligible."""
    K = 0 if rems.free_lags is None else rems.free_lags.shape[1]
    rates = zip(rems.decay.abs().tolist(), rems.dilation, strict=True)
    return [d * max(K, _steps_that_matter(rate)) for rate, d in rates]


def _steps_that_matter(rate: float) -> int:
    if rate >= 1:
        return 2**62
    return 1 if rate == 0 else max(1, math.ceil(math.log(NEGLIGIBLE * (1 - rate)) / math.log(rate)))
