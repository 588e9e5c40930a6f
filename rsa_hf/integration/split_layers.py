"""Layers whose heads are split over processes: which heads this process has, and whether that can be known.

Under tensor parallelism, transformers (`tp_plan`) and torch (`parallelize_module`) split q, k and v by their outputs,
so that each process has a run of heads, and the output projection by its inputs. Both keep the split weights as
DTensors, which are read in each call. DeepSpeed's AutoTP replaces the weights; then the layer has fewer heads.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.layer import RSAHeads
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.shard import Shard
from rsa_hf.utils.text import shorten


def run_heads(module: nn.Module, rsa: RSAHeads, attention: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """Equation 4 for the RSA heads of a layer that this process has; arguments and output as in `RSAHeads`."""
    if rsa.layer_shape == _shape(attention, value, None):
        return rsa(attention, value, mask)  # type: ignore[no-any-return]
    shard = shard_of(module, attention)
    shape = _shape(attention, value, shard)
    if rsa.layer_shape != shape and not torch.compiler.is_compiling():
        cut = {type(part).__name__ for part in module.modules() if type(part).__module__.startswith("deepspeed.")}
        if rsa.layer_shape is not None or cut:
            has = "{} heads, {} value heads and a head size of {}"
            before = f"had {has.format(*rsa.layer_shape)} when it was patched" if rsa.layer_shape else "was whole"
            by = f" by {shorten(sorted(cut))}" if cut else ""
            raise ValueError(
                f"this {type(module).__name__} {before}, and now has {has.format(*shape)}: it was cut up{by}. RSA "
                "heads are given by their index in the whole layer, so the recurrence would be mixed into other "
                "heads. Leave tensor parallelism to transformers: from_pretrained(..., tp_plan='auto')."
            )
        rsa.layer_shape = shape
    split = () if shard is None else (shard,)  # whole layers may have heads of a class without `shard`
    return rsa(attention, value, mask, *split)  # type: ignore[no-any-return]


def layer_shape(module: nn.Module, attention: Tensor, value: Tensor) -> tuple[int, int, int]:
    """Heads, value heads and head size of a layer, on all processes together."""
    return _shape(attention, value, shard_of(module, attention))


def _shape(attention: Tensor, value: Tensor, shard: Shard | None) -> tuple[int, int, int]:
    size, (_, Hv, _, D) = 1 if shard is None else shard.size, value.shape
    return attention.shape[2] * size, Hv * size, D


def shard_of(module: nn.Module, attention: Tensor) -> Shard | None:
    """The run of heads that this process has in a call of attention; None if it has all of them.

    The output projection shows it: it takes either what attention returns here, [B, T, H, D], or what all processes
    return together.
    """
    if not dist.is_initialized():
        return None
    width, split = attention.shape[2] * attention.shape[3], False
    shards: set[Shard | None] = set()
    for child in module.modules():
        for weight in child._parameters.values():
            if not isinstance(weight, DTensor) or weight.dim() < 2:
                continue
            mesh, last = weight.device_mesh, weight.dim() - 1
            over = [i for i, part in enumerate(weight.placements) if mesh.size(i) > 1 and not part.is_replicate()]
            if len(over) == 1 and isinstance(child, FSDPModule):
                continue  # the weight is whole when its module is called
            split = split or bool(over)
            for i in (i for i in over if weight.placements[i].is_shard(last)):
                if weight.shape[last] == width:
                    shards.add(None)
                elif weight.shape[last] == width * mesh.size(i):
                    shards.add(Shard(mesh.get_local_rank(i), mesh.size(i), mesh.get_group(i)))
    if split and len(shards) != 1:
        raise NotImplementedError(
            f"RSA cannot tell which heads of {type(module).__name__} this process has: its weights are split over "
            f"processes, and attention gives {attention.shape[2]} heads of size {attention.shape[3]} here. The number "
            "of heads must be a multiple of the number of processes, and the output projection must be in this module "
            "and split by its inputs (transformers' style 'rowwise', torch's RowwiseParallel)."
        )
    return next(iter(shards), None)


def require_whole_sequence(model: PreTrainedModel) -> None:
    """Refuse a model whose sequence transformers has split across processes."""
    if (model._tp_size or 1) > 1 and "sequence_parallel" in (model._tp_plan or {}).values():
        raise NotImplementedError(
            "RSA does not work with the style 'sequence_parallel' of a tp_plan: each process has a part of the "
            "sequence, and recurrence needs all of it. Use a tp_plan without it, e.g. tp_plan='auto'."
        )
