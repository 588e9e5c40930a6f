"""FSDP2: RSA parameters that stay float32 while the rest of the model computes in half precision."""

from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from rsa_hf.layer import RSAHeads


def shard_rsa_heads(model: nn.Module, accelerator: Accelerator) -> None:
    """Make the RSA heads an FSDP2 unit of their own, without mixed precision.

    FSDP2's mixed precision rounds all parameters of a unit before the forward pass. Rounded to bfloat16, a decay of
    0.99 shortens its memory by a few per cent, and small optimiser steps have no effect.

    Call it before the optimiser is made and before `accelerator.prepare(model, optimizer)`; with a Trainer, pass
    `trainer.accelerator` and call it before `trainer.train()`. Without FSDP2 or RSA heads it does nothing.

    Raises:
        ValueError: the FSDP plugin is set to `cpu_ram_efficient_loading`, which cannot load existing units.
    """
    heads: list[nn.Module] = [module for module in model.modules() if isinstance(module, RSAHeads)]
    if not heads or not accelerator.is_fsdp2 or isinstance(heads[0], FSDPModule):
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        raise ValueError("fsdp_cpu_ram_efficient_loading=True does not work with RSA heads. Set it to false.")
    mesh = accelerator.torch_device_mesh
    # The mesh that Accelerate uses for the other units.
    part = None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    fully_shard(heads, mesh=part, offload_policy=plugin.cpu_offload)
    # Accelerate finds the optimiser's parameters by `data_ptr()`. An empty local shard has the address 0, and most RSA
    # parameters have fewer elements than there are processes: give each empty shard an address of its own.
    parameters: list[Any] = [parameter for module in heads for parameter in module.parameters()]
    for i, parameter in enumerate(parameters):
        if not parameter._local_tensor.numel():
            parameter._local_tensor.data_ptr = partial(int, -1 - i)
