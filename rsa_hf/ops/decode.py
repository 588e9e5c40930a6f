"""P V of one query behind a cache: a weighted sum of the values, with no chunks and nothing to wait for.

The weights of all lags are kept from step to step, as far back as they matter: with |z| ≤ ρ, all that lies more than
L steps back adds at most ρ^{L+1} / (1 − ρ) times the largest value. No gradients: where they are wanted, `recur` does
the same.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.powers import weights_of_lags
from rsa_hf.ops.types import Rems, working_dtype

__all__ = ["LagTable", "decode"]

NEGLIGIBLE = 2.0**-30  # of the largest value, in P V: below what float32 resolves


class LagTable:
    """F(τ) of every head at the lags 0 … L beyond which nothing matters: [H, L + 1], and its mirror image.

    Args:
        rems: the heads; the table holds for these rates alone.
        dtype: of the table.
        longest: a lag that no query exceeds.
    """

    def __init__(self, rems: Rems, dtype: torch.dtype, longest: int) -> None:
        reach = _reach(rems)
        self.longest = math.inf if reach <= longest else longest
        lags = torch.arange(min(reach, longest) + 1, device=rems.decay.device)
        self.weights = weights_of_lags(rems, lags, dtype)[0]
        self.newest_last = self.weights.flip(-1).contiguous()


def decode(value: Tensor, rems: Rems, mask: AttentionMask, table: LagTable | None) -> Tensor:
    """P V of the only query: [B, H, 1, D], in the dtype it is computed in.

    Args:
        value: V, shape [B, Hv, S, D].
        rems: the heads.
        mask: of a single causal query.
        table: the weights of these heads; None computes those of all S lags.
    """
    S, device = value.shape[2], value.device
    dtype = working_dtype(value)
    if mask.visible is None and mask.key_mask is None:
        # The query's place is known, so the keys within reach are a slice.
        end = mask.query_offset + 1
        if table is None:
            weights = weights_of_lags(rems, torch.arange(end - 1, -1, -1, device=device), dtype)[0]
        else:
            weights = table.newest_last
        seen = min(weights.shape[1], end, mask.sliding_window or end)
        if seen < weights.shape[1]:
            weights = weights[:, -seen:]
        return _weighted_sum(weights[None], value.narrow(2, end - seen, seen), rems.heads_per_value)
    position = mask.query_offset if mask.query_position is None else mask.query_position
    lags = position - torch.arange(S, device=device)
    if table is None:
        weights = weights_of_lags(rems, lags, dtype)[0]
    else:
        last = table.weights.shape[1] - 1
        weights = torch.where(lags <= last, table.weights[:, lags.clamp(0, last)], 0)
    if mask.sliding_window is not None:
        weights = torch.where(lags < mask.sliding_window, weights, 0)
    if mask.visible is not None:
        weights = torch.where(mask.visible[:, : len(weights), 0], weights, 0)
    if mask.key_mask is not None:
        weights = torch.where(mask.key_mask[:, None], weights, 0)
    return _weighted_sum(weights.expand(len(value), -1, -1), value, rems.heads_per_value)


def _weighted_sum(weights: Tensor, value: Tensor, heads_per_value: int) -> Tensor:
    """Σ_s w_s v_s for weights [B or 1, H, S] and values [B, Hv, S, D]: [B, H, 1, D]."""
    H = weights.shape[1]
    shared = -(-H // heads_per_value)
    if shared * heads_per_value > H:
        weights = F.pad(weights, (0, 0, 0, shared * heads_per_value - H))
    if shared < value.shape[1]:
        value = value[:, :shared]
    B, _, S, D = value.shape
    # The heads that share a value head are the rows of one matrix product. (Not `matmul`: what it does to bring its
    # arguments to this form takes longer than the product.)
    rows = weights.expand(B, -1, -1).reshape(B * shared, heads_per_value, S)
    columns = value.to(weights.dtype).reshape(B * shared, S, D)
    if torch.is_autocast_enabled(value.device.type):
        # It would multiply in half precision.
        with torch.autocast(value.device.type, enabled=False):
            sums = torch.bmm(rows, columns)
    else:
        sums = torch.bmm(rows, columns)
    return sums.view(B, shared * heads_per_value, 1, D)[:, :H]


def _reach(rems: Rems) -> int:
    """The lag beyond which all that a head still reads is negligible."""
    reach = 1
    for rate, d in zip(rems.decay.abs().tolist(), rems.dilation, strict=True):
        if rate >= 1:
            return 2**62
        if rate > 0:
            reach = max(reach, d * math.ceil(math.log(NEGLIGIBLE * (1 - rate)) / math.log(rate)))
    return reach
