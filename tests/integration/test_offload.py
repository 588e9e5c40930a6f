"""Sharded and offloaded models, and device maps: the outputs do not change by a bit."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

from families import FULL_PLAN, build_language_model, inputs, patched
from rsa_hf import is_patched, patch_model, rsa_report, unpatch_model
from rsa_hf.layer import RSAHeads

FAMILIES = ["gpt2", "llama", "t5"]


@pytest.fixture(params=FAMILIES)
def case(request):
    model, batch = patched(request.param), inputs(request.param)
    with torch.no_grad():
        expected = model(**batch).logits
        plain = unpatch_model(copy.deepcopy(model))(**batch).logits
    assert (expected - plain).abs().max() > 1e-2  # lost RSA heads would show
    return model, batch, expected


@pytest.mark.parametrize("where", ["disk", "memory"])
@torch.no_grad()
def test_offloaded_weights_change_no_output(case, tmp_path, where):
    model, batch, expected = case
    if where == "disk":
        offloaded = disk_offload(copy.deepcopy(model), tmp_path, execution_device=torch.device("cpu"))
        assert any(".rsa.mu" in path.name for path in tmp_path.iterdir())
    else:
        offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert torch.equal(offloaded(**batch).logits, expected)
    assert rsa_report(offloaded) == rsa_report(model)
    # Between calls the parameters of the heads are on the meta device.
    heads = [module for module in offloaded.modules() if isinstance(module, RSAHeads)]
    assert heads and all(parameter.device.type == "meta" for module in heads for parameter in module.parameters())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_layers_offloaded_to_disk_on_loading_change_no_output(family, tmp_path):
    model = patched(family)
    model.save_pretrained(tmp_path / "model")
    base, layers = model.base_model_prefix, {"gpt2": "h", "llama": "layers"}[family]
    names = [f"{base}.{name}" for name, _ in getattr(model, base).named_children() if name != layers]
    last = f"{base}.{layers}.1"
    device_map = {**dict.fromkeys([*names, "lm_head", f"{base}.{layers}.0"], "cpu"), last: "disk"}
    offload = {"device_map": device_map, "offload_folder": str(tmp_path / "offload")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **offload)
    waiting = loaded.get_submodule(last)
    assert all(parameter.device.type == "meta" for parameter in waiting.parameters())
    ids = torch.randint(3, 90, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        ours, expected = (one.generate(ids, max_new_tokens=6, do_sample=False) for one in (loaded, model))
    assert torch.equal(ours, expected)


def test_patching_an_offloaded_model_is_an_error():
    model = cpu_offload(build_language_model("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="weights are offloaded: load it without device_map"):
        patch_model(model, FULL_PLAN)
    assert not is_patched(model)
