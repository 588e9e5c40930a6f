"""P V of one query after cached keys: a weighted sum of values, without chunks, gradients or waiting for a device.

The weights f(τ) are kept from step to step, as far back as they matter: with |z| ≤ ρ, everything more than L steps
back adds at most ρ^{L+1} / (1 − ρ) times the largest value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask, boolean_mask
from rsa_hf.rem import Rems, constant, take_heads, weights_of_lags, working_dtype

__all__ = ["LagTable", "decode"]

NEGLIGIBLE = 2.0**-30  # of the largest value, in P V: below what float32 resolves


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
    shared = rems.heads_per_value
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
    rates = zip(rems.decay.abs().tolist(), rems.dilation, strict=True)
    return [d * _steps_that_matter(rate) for rate, d in rates]


def _steps_that_matter(rate: float) -> int:
    if rate >= 1:
        return 2**62
    return 1 if rate == 0 else max(1, math.ceil(math.log(NEGLIGIBLE * (1 - rate)) / math.log(rate)))
