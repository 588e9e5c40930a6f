"""FSDP2 through Accelerate in two processes, and FSDP1: the gradients of one, and RSA parameters in float32."""

import json

import fsdp_run as single
import pytest
import torch
import torch.distributed
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM

from launching import run_processes
from rsa_hf import param_groups, rsa_report
from small_runs import assert_same_weights


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    run_processes(2, single.__file__, folder)
    return folder


@pytest.fixture(scope="module")
def alone():
    """The model, the losses and the first gradients of the same batches in one process, in float32."""
    model = single.language_model()
    optimizer = torch.optim.AdamW(param_groups(model, 1e-2))
    steps = [single.step(model, optimizer, ids, torch.Tensor.backward) for ids in single.batches()]
    return model, [loss for loss, _ in steps], steps[0][1]


def read(folder, name):
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]


def errors(gradients, expected):
    return {name: float((gradients[name] - value).norm() / value.norm()) for name, value in expected.items()}


@pytest.mark.slow
def test_without_mixed_precision_two_processes_learn_like_one(sharded, alone):
    model, losses, gradients = alone
    both = read(sharded, "exact")
    for step, loss in enumerate(losses):
        assert sum(found[0][step] for found in both) / 2 == pytest.approx(loss, rel=1e-5)
    assert max(errors(both[0][1], gradients).values()) < 1e-5
    weights = both[0][5]
    start = single.language_model().state_dict()
    for name, value in model.state_dict().items():
        assert (weights[name] - value).norm() < 1e-3 * (value - start[name]).norm(), name


@pytest.mark.slow
def test_gates_and_rates_compute_in_float32_under_mixed_precision(sharded, alone):
    ours, rounded = read(sharded, "bf16")[0], read(sharded, "rounded")[0]
    assert ours[2] == ["torch.float32"]
    assert rounded[2] == ["torch.bfloat16"]  # without a unit of their own
    assert ours[3] == rounded[3] == ["torch.float32"]
    # Activations are bfloat16 in both, so gradients agree with float32 to the precision of bfloat16.
    rsa = {name: error for name, error in errors(ours[1], alone[2]).items() if ".rsa." in name}
    assert len(rsa) == 8
    assert max(rsa.values()) < 0.1
    assert all(not torch.equal(ours[1][name], rounded[1][name]) for name in rsa)


@pytest.mark.slow
def test_reports_and_saved_models_have_all_parameters(sharded):
    first, second = read(sharded, "bf16")
    assert first[4] == second[4]
    saved = AutoModelForCausalLM.from_pretrained(sharded / "model")
    assert_same_weights(saved.state_dict(), first[5])
    report = rsa_report(saved).to_dict()
    assert report["layers"] == first[4]["layers"]
    assert report != rsa_report(single.language_model()).to_dict()


@pytest.mark.slow
def test_ram_efficient_loading_is_refused(sharded):
    for rank in (0, 1):
        assert "Set it to false" in json.loads((sharded / f"refused-{rank}.json").read_text())


def test_a_model_sharded_on_the_meta_device_starts_where_the_plan_says(one_process):
    expected = single.language_model()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(expected.config)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.init_weights()
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items() if ".rsa." in name)


# --- FSDP1 ----------------------------------------------------------------------------------------------------------


def trained(model, ids):
    """Train a step; returns its loss, and all parameters after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item(), {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_of_half_precision_trains_with_units_of_rsa_heads(one_process, use_orig_params):
    """As Accelerate reads them from fsdp_transformer_layer_cls_to_wrap."""
    model, ids = single.language_model().bfloat16(), single.batches()[0]
    loss, expected = trained(single.language_model().bfloat16(), ids)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer", "RSAHeads"],
    )
    plugin.set_auto_wrap_policy(model)
    settings = {"use_orig_params": use_orig_params, "auto_wrap_policy": plugin.auto_wrap_policy}
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **settings)
    model(input_ids=ids, labels=ids)
    found, state = trained(model, ids)
    assert found == loss
    assert_same_weights(state, expected)
    assert {str(value.dtype) for name, value in state.items() if ".rsa." in name} == {"torch.float32"}
