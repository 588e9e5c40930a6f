"""FSDP2: RSA parameters that stay float32 while the rest of the model computes in half precision."""

from __future__ import annotations

from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from rsa_hf.heads import RSAHeads

__all__ = ["shard_rsa_heads"]


def shard_rsa_heads(model: nn.Module, accelerator: Accelerator) -> None:
    """Make the RSA heads an FSDP2 unit of their own, without mixed precision.

    FSDP2's mixed precision rounds every parameter of a unit before the forward pass uses it. A decay of 0.99 loses a
    few per cent of its memory's length to bfloat16, and small steps of the optimiser have no effect. A unit with a
    policy of its own does not; all heads together are one, so that their few numbers are gathered at once.

    To be called before `accelerator.prepare(model, optimizer)` or, with `trainer.accelerator`, `trainer.train()`, and
    before an optimiser is made. Does nothing where `accelerator` does not use FSDP2, or the model has no RSA heads.

    Args:
        model: a patched model.
        accelerator: the one that will prepare it.

    Raises:
        ValueError: the FSDP plugin is set to `cpu_ram_efficient_loading`, which cannot load units that exist already.
    """
    heads: list[nn.Module] = [module for module in model.modules() if isinstance(module, RSAHeads)]
    if not heads or not accelerator.is_fsdp2 or isinstance(heads[0], FSDPModule):
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading=True does not work with RSA heads, which are a unit of their own so that "
            "they stay float32. Set it to false in the Accelerate config."
        )
    mesh = accelerator.torch_device_mesh
    # The mesh that Accelerate gives the model's other units.
    part = None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    fully_shard(heads, mesh=part, offload_policy=plugin.cpu_offload)
    # Accelerate tells the parameters that it swaps in the optimiser apart by the address of this process's part. There
    # are more processes than numbers in most of these parameters, and all empty parts have the address 0.
    parameters: list[Any] = [parameter for module in heads for parameter in module.parameters()]
    for i, parameter in enumerate(parameters):
        if not parameter._local_tensor.numel():
            parameter._local_tensor.data_ptr = partial(int, -1 - i)
