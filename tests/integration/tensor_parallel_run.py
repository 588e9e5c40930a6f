"""Checks of tensor parallelism in each of several processes: `torchrun … tensor_parallel_run.py FOLDER [CHECK …]`.

A model that is split over the processes is compared with the whole model. Each process writes what it found for each
check: "passed", or a traceback. Those after it do not run, since the processes may no longer wait for each other.
"""

import datetime
import json
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import rsa_hf.peft
from families import FULL_PLAN, VOCAB, build, inputs, move_rates, tiny_config, widen
from rsa_hf import HeadConfig, RSAConfig, calibrate, is_patched, patch_model, rsa_report, unpatch_model
from rsa_hf.integration.split_layers import shard_of

TOLERANCE = 1e-4  # relative to the largest entry; models compute in float64, but routers of experts in float32
EXPERTS = {"experts_implementation": "eager"}  # others do not compute in float64

EVEN_VOCAB = VOCAB + 1  # transformers 5.17 splits no other

ON_THE_LAST = [
    HeadConfig(0, 5, "regular", decay=-0.8, gate=0.6),
    HeadConfig(0, 7, "sin", decay=0.9, gate=0.2, theta=0.7, dilation=2),
    HeadConfig(1, 4, "cos", decay=0.7, gate=0.5, theta=1.0),
]
PLANS = {  # for 8 heads on 2 processes
    "all on the first": RSAConfig(num_regular=1, num_cyclical_pairs=1, gate_init=0.5),
    "all on the last": RSAConfig(heads=ON_THE_LAST),
    "uneven, a pair over both": RSAConfig(num_regular=3, num_cyclical_pairs=1, gate_init=0.5),
    "every kind": RSAConfig.from_dict(FULL_PLAN),
}


# --- a split model and the whole one --------------------------------------------------------------------------------


def save(model, folder):
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()


def split(folder, dtype=torch.float64, **settings):
    """A saved model, split over the processes."""
    config = DistributedConfig(**{"tp_size": dist.get_world_size()} | settings)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=config, **EXPERTS)


def in_one(folder, dtype=torch.float64):
    """A saved model, whole on each process."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **EXPERTS)


def pair(folder, model):
    """The model split over the processes, and the whole model, both loaded."""
    save(model, folder)
    return split(folder), in_one(folder)


def llama(plan, num_key_value_heads=2, **sizes):
    config = tiny_config("llama", vocab_size=EVEN_VOCAB, num_key_value_heads=num_key_value_heads, **sizes)
    model = widen(AutoModelForCausalLM.from_config(config))
    return model if plan is None else move_rates(patch_model(model, plan))


def tokens(length=11, batch=2):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_values(model, other):
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements)
        parameter.copy_(value)


def assert_close(found, expected, what, tolerance=TOLERANCE):
    difference = (whole(found) - whole(expected)).abs().max() / expected.abs().max().clamp(min=1e-6)
    assert difference < tolerance, f"{what} differs by {difference:.1e}"


def assert_same_gradients(model, other, ids, tolerance=TOLERANCE):
    for each in (model, other):
        each.zero_grad()
        each(input_ids=ids, labels=ids).loss.backward()
    compared = 0
    for (name, parameter), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if expected.grad is not None:
            assert_close(parameter.grad, expected.grad, f"the gradient of {name}", tolerance)
            compared += ".rsa." in name
    return compared


def assert_same(model, other):
    """Logits, gradients of all parameters, three steps of training, and generation."""
    ids = tokens()
    with torch.no_grad():
        assert_close(model(ids).logits, other(ids).logits, "logits")
    assert assert_same_gradients(model, other, ids) == sum(".rsa." in name for name, _ in other.named_parameters())
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.01, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    for (name, parameter), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(parameter, expected, f"{name} after three steps")
    assert_replicas_are_equal(model)
    for settings in ({}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}):
        settings = {"max_new_tokens": 3, "do_sample": False, **settings}
        assert torch.equal(model.generate(ids, **settings), other.generate(ids, **settings))


def assert_replicas_are_equal(model):
    for name, parameter in model.named_parameters():
        if ".rsa." in name:
            copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, parameter.detach())
            assert all(torch.equal(each, copies[0]) for each in copies), f"{name} is not the same on each process"


# --- checks ---------------------------------------------------------------------------------------------------------


def as_one_process(plan):
    def check(folder):
        model, other = pair(folder / "before", llama(plan))
        assert_same(model, other)
        model.save_pretrained(folder / "after")
        saved = in_one(folder / "after")
        assert saved.config.rsa == other.config.rsa
        for (name, parameter), expected in zip(saved.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(parameter, whole(expected[1])), name

    return check


def patched_after_the_split(folder):
    model, other = pair(folder / "plain", llama(None))
    plan = PLANS["uneven, a pair over both"]
    for each in (model, other):
        patch_model(each, plan)
    assert model.config.rsa == other.config.rsa
    assert str(rsa_report(model)) == str(rsa_report(other))
    assert patch_model(model, plan) is model
    assert_same(model, other)
    for each in (model, other):
        unpatch_model(each)
    assert_same_gradients(model, other, tokens())


def without_sums(folder):
    """The broken variant: each process trains gates and rates for its own heads."""
    model, other = pair(folder / "sums", llama(PLANS["every kind"]))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with changed_shard(group=alone), pytest.raises(AssertionError, match=r"\.rsa\."):
        assert_same_gradients(model, other, tokens())
    assert_same_gradients(model, other, tokens())


def first_heads_everywhere(folder):
    """The broken variant: each process takes its heads for the first ones."""
    model, other = pair(folder / "first", llama(PLANS["all on the first"]))
    with torch.no_grad():
        expected = other(tokens()).logits
        with changed_shard(rank=0), pytest.raises(AssertionError, match="logits"):
            assert_close(model(tokens()).logits, expected, "logits")
        assert_close(model(tokens()).logits, expected, "logits")


def changed_shard(**change):
    def changed(module, attention):
        shard = shard_of(module, attention)
        return shard and shard._replace(**change)  # none in the whole model

    return mock.patch("rsa_hf.integration.split_layers.shard_of", changed)


def split_by_torch(folder):
    """`parallelize_module`, of which transformers knows nothing."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save(llama(PLANS["uneven, a pair over both"]), folder / "torch")
    model, other = (in_one(folder / "torch") for _ in range(2))
    styles = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, {**styles, "o_proj": RowwiseParallel()})
    assert_same(model, other)


def refused(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = split(save_plain(folder))
    batches = [{"input_ids": row, "labels": row} for row in tokens(12, batch=12).split(4)]
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        calibrate(plain, batches, progress=False)
    assert not is_patched(plain)

    save(llama(FULL_PLAN), folder / "sequence")
    style = {"tp_plan": {"model.norm": "sequence_parallel"}}
    with pytest.raises(NotImplementedError, match="'sequence_parallel'"):
        split(folder / "sequence", **style)
    plain = split(save_plain(folder), **style)
    with pytest.raises(NotImplementedError, match="'sequence_parallel'"):
        patch_model(plain)
    assert not is_patched(plain)

    bert = patch_model(build("bert"), FULL_PLAN)  # its output projection is in another module
    for layer in bert.encoder.layer:
        names = ("query", "key", "value")
        parallelize_module(layer.attention.self, mesh, {name: ColwiseParallel() for name in names})
        parallelize_module(layer.attention.output, mesh, {"dense": RowwiseParallel()})
    with pytest.raises(NotImplementedError, match="BertSelfAttention"):
        bert(**inputs("bert"))


def save_plain(folder):
    save(llama(None), folder / "plain")
    return folder / "plain"


def adapters(folder):
    """PEFT: gates and rates alone, and beside LoRA on split layers."""
    plan, ids = PLANS["uneven, a pair over both"], tokens()
    lora = rsa_hf.peft.peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for config in (lora, None):
        bases = split(save_plain(folder)), in_one(folder / "plain")
        both = [rsa_hf.peft.get_peft_model(base, config, plan) for base in bases]
        copy_values(*both)
        assert assert_same_gradients(*both, ids)
    both[0].save_pretrained(folder / "rsa", is_main_process=dist.get_rank() == 0)
    dist.barrier()
    loaded = rsa_hf.peft.load(in_one(folder / "plain"), folder / "rsa")
    with torch.no_grad():
        assert_close(loaded(input_ids=ids).logits, both[0](input_ids=ids).logits, "the logits of an adapter")


# --- four processes -------------------------------------------------------------------------------------------------


def with_fsdp(folder):
    """Two pairs of processes, each with the whole model, whose weights FSDP2 stores in parts."""
    save(llama(PLANS["uneven, a pair over both"]), folder / "fsdp")
    model = split(folder / "fsdp", torch.float32, tp_size=2, fsdp_size=2)  # of one dtype, as FSDP2 needs it
    other = in_one(folder / "fsdp", torch.float32)
    assert assert_same_gradients(model, other, tokens(), tolerance=1e-3)
    model.save_pretrained(folder / "fsdp saved")
    dist.barrier()
    saved = in_one(folder / "fsdp saved", torch.float32)
    assert all(map(torch.equal, saved.parameters(), other.parameters()))


def uneven_heads(folder):
    """Seven heads on four processes: 2, 2, 2 and 1. Plain Llama runs, but indices of heads would be wrong."""
    model = llama(None, num_key_value_heads=7, num_attention_heads=7, hidden_size=28, head_dim=2)
    save(model, folder / "seven plain")
    plain = split(folder / "seven plain")
    with torch.no_grad():
        assert_close(plain(tokens()).logits, in_one(folder / "seven plain")(tokens()).logits, "logits")
    save(patch_model(model), folder / "seven")
    with pytest.raises(NotImplementedError, match="multiple of the number of processes"):
        split(folder / "seven")(tokens())


TWO = {
    **{name: as_one_process(plan) for name, plan in PLANS.items()},
    "patched after the split": patched_after_the_split,
    "gradients not summed": without_sums,
    "first heads everywhere": first_heads_everywhere,
    "split by torch": split_by_torch,
    "adapters": adapters,
    "refused": refused,
}
if Version(peft.__version__) < Version("0.20"):
    del TWO["adapters"]  # it gives layers that are split LoRA matrices of whole ones
FAST = ["uneven, a pair over both", "gradients not summed", "first heads everywhere", "refused"]
FOUR = {
    "four processes": lambda folder: assert_same(*pair(folder / "four", llama(FULL_PLAN, num_key_value_heads=4))),
    "uneven heads": uneven_heads,
    "with FSDP": with_fsdp,
}


def main(folder, names):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    outcomes = {}
    for name in names:
        torch.manual_seed(0)
        try:
            (TWO | FOUR)[name](folder)
            outcomes[name] = "passed"
        except (Exception, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
            break
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(outcomes), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
