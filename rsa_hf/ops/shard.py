"""`Shard`, the run of a layer's heads that one process has under tensor parallelism.

Each process has every gate and rate of a layer, and uses those of its own heads. Its gradients cover these heads only,
so they are summed over the processes; copies that start equal then stay equal.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rsa_hf.ops.problem import Learned


class Shard(NamedTuple):
    """Process `rank` of `size` processes that share a layer's heads evenly, in runs, in the order of ranks.

    `group` is their `torch.distributed.ProcessGroup`.
    """

    rank: int
    size: int
    group: Any

    def heads(self, num_heads: int) -> range:
        """The heads of the layer that this process has, if each process has `num_heads`."""
        return range(self.rank * num_heads, (self.rank + 1) * num_heads)


def sum_gradients(attention: Tensor, learned: Learned, shard: Shard) -> tuple[Tensor, Learned]:
    """Return the same tensors, with the gradients of `learned` summed over the processes.

    A process without RSA heads takes part in the sum if it continues with the returned attention.
    """
    given = {name: tensor for name, tensor in learned._asdict().items() if tensor is not None}
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in given.values()):
        return attention, learned
    attention, *tensors = _SumGradients.apply(shard.group, attention, *given.values())  # type: ignore[no-untyped-call]
    return attention, learned._replace(**dict(zip(given, tensors, strict=True)))


class _SumGradients(torch.autograd.Function):
    """Passes all tensors through; sums the gradients of what is learned over the processes."""

    @staticmethod
    def forward(ctx: Any, group: Any, attention: Tensor, *learned: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in (attention, *learned))

    @staticmethod
    def backward(ctx: Any, attention: Tensor, *learned: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError("RSA has no second derivatives (create_graph=True) under tensor parallelism.")
        total = torch.cat(learned)  # several small collectives take longer
        dist.all_reduce(total, group=ctx.group)
        return None, attention, *total.split([len(tensor) for tensor in learned])
