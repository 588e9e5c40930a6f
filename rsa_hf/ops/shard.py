"""`Shard`, the run of a layer's heads that one process has under tensor parallelism.

Each process has every gate and rate of a layer, and uses those of its own heads. Its gradients cover these heads only,
so they are summed over the processes; copies that start equal then stay equal.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rsa_hf.rem import Rems


class Shard(NamedTuple):
    """Process `rank` of `size` processes that share a layer's heads evenly, in runs, in the order of ranks.

    `group` is their `torch.distributed.ProcessGroup`.
    """

    rank: int
    size: int
    group: Any

    def heads(self, num_heads: int) -> range:
        """Which of the layer's heads a process has, if each has `num_heads`."""
        return range(self.rank * num_heads, (self.rank + 1) * num_heads)


def local_heads(attention: Tensor, rems: Rems, gate: Tensor, shard: Shard | None) -> tuple[Tensor, Rems, Tensor]:
    """The RSA heads that this process has, with indices among its own heads.

    Their gradients are summed over the processes. A process without RSA heads takes part if it goes on with the
    attention that is returned.

    Args:
        attention: output of softmax attention for the heads of this process, [B, T, H', D].
        rems: all RSA heads of the layer.
        gate: g of each of them, shape (H,).
        shard: the run of heads that `attention` has; None: it has all of them, and nothing is done.

    Returns:
        The same attention, and the REMs and gates of the RSA heads in the run, perhaps of none.
    """
    if shard is None:
        return attention, rems, gate
    rates = [rate for rate in (*rems.rates, gate) if rate is not None]
    if torch.is_grad_enabled() and any(rate.requires_grad for rate in rates):
        attention, *rates = _SumGradients.apply(shard.group, attention, *rates)  # type: ignore[no-untyped-call]
    run = shard.heads(attention.shape[2])
    some = slice(bisect_left(rems.heads, run.start), bisect_left(rems.heads, run.stop))
    decay, theta, *amplitude, gate = (rate[some] for rate in rates)
    places = tuple(head - run.start for head in rems.heads[some])
    local = Rems(rems.kinds[some], decay, theta, rems.dilation[some], rems.num_key_value_groups, places, *amplitude)
    return attention, local, gate


class _SumGradients(torch.autograd.Function):
    """Passes all tensors through; sums the gradients of the rates over the processes."""

    @staticmethod
    def forward(ctx: Any, group: Any, attention: Tensor, *rates: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in (attention, *rates))

    @staticmethod
    def backward(ctx: Any, attention: Tensor, *rates: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError("RSA has no second derivatives (create_graph=True) under tensor parallelism.")
        total = torch.cat([rate.flatten() for rate in rates])  # several small collectives take longer
        dist.all_reduce(total, group=ctx.group)
        parts = total.split([rate.numel() for rate in rates])
        return None, attention, *(part.view_as(rate) for part, rate in zip(parts, rates, strict=True))
