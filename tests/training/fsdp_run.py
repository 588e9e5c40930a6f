"""The program of the FSDP2 tests in both processes: `torchrun … fsdp_run.py FOLDER`.

torch has FSDP for CPUs, Accelerate for accelerators only. Accelerate is told that these processes have GPUs, so that
its own code runs.
"""

import json
import logging
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from rsa_hf import RSAConfig, param_groups, patch_model, rsa_report
from rsa_hf.children import active_heads
from rsa_hf.training.fsdp import shard_rsa_heads

STEPS = 3


def language_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64))
    return patch_model(model, RSAConfig(num_regular=1, num_cyclical_pairs=1, gate_init=0.0))


def batches():
    return torch.randint(3, 64, (STEPS, 4, 16), generator=torch.Generator().manual_seed(1))


def step(model, optimizer, ids, backward):
    loss = model(input_ids=ids, labels=ids).loss
    backward(loss)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients = {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in gradients.items()}
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


def fsdp2(mixed_precision="no", **plugin):
    """An accelerator with FSDP2 on processes that it takes for ones with GPUs."""
    PartialState(cpu=True)
    AcceleratorState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **plugin)
    accelerator = Accelerator(mixed_precision=mixed_precision, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    return accelerator


def sharded(mixed_precision, own_unit, folder):
    """Train; returns this process's losses, the first gradients, the dtypes in use and stored, report and weights."""
    accelerator = fsdp2(mixed_precision, state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False)
    model = language_model()
    if own_unit:
        shard_rsa_heads(model, accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(param_groups(model, 1e-2)))
    # The optimiser of each process has each parameter of the model once, also those whose local part is empty.
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, listed)) == sorted(id(p) for p in model.parameters())
    dtypes = set()
    for _, heads in active_heads(model):
        heads.register_forward_pre_hook(lambda heads, _: dtypes.add(str(heads.mu.dtype)))
        assert isinstance(heads.mu, DTensor)
    rank = accelerator.process_index
    losses, first = [], None
    for ids in batches():
        loss, gradients = step(model, optimizer, ids[2 * rank : 2 * rank + 2], accelerator.backward)
        losses.append(loss)
        first = gradients if first is None else first
    stored = {str(p.dtype) for name, p in model.named_parameters() if ".rsa." in name}
    report = rsa_report(model)
    weights = accelerator.get_state_dict(model)
    if folder is not None:
        # A step, and the same step again from the checkpoint.
        accelerator.save_state(str(folder))
        again = []
        for _ in range(2):
            step(model, optimizer, batches()[0][2 * rank : 2 * rank + 2], accelerator.backward)
            again.append({name: p.to_local().clone() for name, p in model.named_parameters()})
            accelerator.load_state(str(folder))
        assert all(torch.equal(value, again[1][name]) for name, value in again[0].items())
        loaded = accelerator.get_state_dict(model)
        if rank == 0:
            assert all(torch.equal(value, loaded[name]) for name, value in weights.items())
    return model, (losses, first, sorted(dtypes), sorted(stored), report.to_dict(), weights)


def main(folder):
    accelerator = fsdp2(cpu_ram_efficient_loading=True)
    rank, said = accelerator.process_index, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rsa_hf").addHandler(handler)
    try:
        shard_rsa_heads(language_model(), accelerator)
    except ValueError as error:
        (folder / f"refused-{rank}.json").write_text(json.dumps(str(error)))
    for name, mixed_precision, own_unit in (("exact", "no", True), ("bf16", "bf16", True), ("rounded", "bf16", False)):
        model, found = sharded(mixed_precision, own_unit, folder / "state" if name == "bf16" else None)
        warned = any("gates and rates are rounded" in message for message in said)
        assert warned == (name == "rounded")
        torch.save(found, folder / f"{name}-{rank}.pt")
        if name == "bf16" and rank == 0:
            model.save_pretrained(folder / "model", state_dict=found[-1])
    accelerator.end_training()  # a process group that is left open may abort the process as it ends


if __name__ == "__main__":
    assert os.environ["OMP_NUM_THREADS"] == "1"
    main(Path(sys.argv[1]))
