"""The program of the FSDP1 tests in both processes: `torchrun … fsdp1_run.py FOLDER`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed
from fsdp_run import batches, language_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rsa_hf import RSAHeads

SETTINGS = {
    "parameters as they are": {"use_orig_params": True},
    "flat parameters": {"use_orig_params": False},
    "bfloat16": {"use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy({LlamaDecoderLayer, RSAHeads})},
}


def trained(model, rank):
    """Train a step; returns the loss of this process's rows, and all parameters after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = batches()[0][2 * rank : 2 * rank + 2]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item(), {name: value.clone() for name, value in model.state_dict().items()}


def main(folder):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for name, settings in [*SETTINGS.items(), ("ignored", {"use_orig_params": True})]:
        model = language_model()
        model = model.bfloat16() if name in ("bfloat16", "ignored") else model
        ignored = [module for module in model.modules() if name == "ignored" and isinstance(module, RSAHeads)]
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), ignored_modules=ignored, **settings)
        torch.save(trained(model, rank), folder / f"{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    assert os.environ["OMP_NUM_THREADS"] == "1"
    main(Path(sys.argv[1]))
