"""Adapters with gates and rates: training, saving, loading, merging and switching."""

import copy

import peft
import pytest
import torch
from peft import AutoPeftModelForCausalLM, IA3Config, LNTuningConfig, LoHaConfig, LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from families import CONFIGS, inputs
from model_state import assert_same_state, state_of
from peft_adapters import (
    METHODS,
    PLAN,
    adapter_values,
    base_model,
    disturb,
    logits,
    needs_own_adapters,
    trained_adapter,
)
from rsa_hf import RSAHeads, is_patched, param_groups, patch_model, rsa_report, unpatch_model
from rsa_hf.peft import get_peft_model, load, rsa_only_config, with_rsa

FAMILIES = ["gpt2", "llama", "roberta"]
NORMS = ["ln_1", "input_layernorm", "LayerNorm"]
MERGED = METHODS | {"ln tuning": lambda: LNTuningConfig(target_modules=NORMS)}


def test_an_adapter_that_leaves_gates_and_rates_frozen_warns(tmp_path, recwarn):
    words = "'default' trains no gates and rates.*'rsa' into its modules_to_save"
    with pytest.warns(UserWarning, match=words):
        model = peft.get_peft_model(patch_model(base_model("gpt2"), PLAN), LoraConfig())
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if ".rsa." in name)
    model.save_pretrained(tmp_path)
    recwarn.clear()
    PeftModel.from_pretrained(patch_model(base_model("gpt2"), PLAN), tmp_path)  # for inference
    peft.get_peft_model(patch_model(base_model("gpt2"), PLAN), with_rsa(LoraConfig()))
    peft.get_peft_model(base_model("gpt2"), LoraConfig())
    assert not [warning for warning in recwarn if "gates and rates" in str(warning.message)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_saved_adapter_loads_bit_for_bit(family, method, tmp_path):
    model, batch = trained_adapter(family, method), inputs(family)
    expected = logits(model, batch)
    model.save_pretrained(tmp_path)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert method != "rsa only" or len(load_file(tmp_path / "adapter_model.safetensors")) == 2 * 4
    onto_plain = load(base_model(family), tmp_path)
    onto_patched = PeftModel.from_pretrained(patch_model(base_model(family), PLAN), tmp_path)
    for loaded in (onto_plain, onto_patched):
        assert torch.equal(logits(loaded, batch), expected)
        # PEFT leaves its prompt embeddings trainable.
        assert not any(p.requires_grad for n, p in loaded.named_parameters() if "prompt_encoder" not in n)
        for name, value in adapter_values(model).items():
            assert torch.equal(adapter_values(loaded)[name], value), name
    again = load(base_model(family), tmp_path, is_trainable=method != "prompt", low_cpu_mem_usage=True)
    assert torch.equal(logits(again.eval(), batch), expected)


@needs_own_adapters
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_loads_and_switches_adapters(family, tmp_path):
    batch, patched, expected = inputs(family), patch_model(base_model(family), PLAN), {}
    as_patched = logits(patched, batch)
    for seed, name in enumerate(("first", "second"), 1):
        model = trained_adapter(family, seed=seed)
        model.save_pretrained(tmp_path / name)
        patched.load_adapter(str(tmp_path / name), name)
        expected[name] = logits(model, batch)
        torch.testing.assert_close(logits(patched, batch), expected[name])
    patched.set_adapter("first")
    torch.testing.assert_close(logits(patched, batch), expected["first"])
    patched.disable_adapters()
    assert torch.equal(logits(patched, batch), as_patched)
    patched.enable_adapters()
    torch.testing.assert_close(logits(patched, batch), expected["first"])
    patched.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(base_model(family), tmp_path / "again"), batch), expected["first"])


@pytest.mark.parametrize(
    "auto_class", [AutoPeftModelForCausalLM, pytest.param(AutoModelForCausalLM, marks=needs_own_adapters)]
)
def test_auto_classes_load_an_adapter_whose_base_is_a_patched_checkpoint(auto_class, tmp_path):
    base, batch = patch_model(base_model("llama"), PLAN), inputs("llama")
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = disturb(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")))
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(auto_class.from_pretrained(tmp_path / "adapter"), batch), logits(model, batch))


@pytest.mark.parametrize("method", ["lora", "rsa only", "ia3", "ln tuning"])
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_is_an_ordinary_patched_model(family, method, tmp_path):
    # In float64, where the order of merging does not matter.
    model = disturb(get_peft_model(base_model(family).double(), MERGED[method](), PLAN))
    batch, rates = inputs(family), list(adapter_values(model).values())
    expected = logits(model, batch)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    reloaded = type(merged).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(reloaded, batch), logits(merged, batch))
    assert (logits(reloaded, batch) - expected).abs().max() < 1e-6
    with_untrained_rates = copy.deepcopy(reloaded)
    for module in with_untrained_rates.modules():
        if isinstance(module, RSAHeads):
            module.reset_parameters()
    assert (logits(with_untrained_rates, batch) - expected).abs().max() > 0.01
    found = [value for name, value in reloaded.named_parameters() if ".rsa." in name]
    assert all(torch.equal(a, b) for a, b in zip(found, rates, strict=True))
    assert patch_model(reloaded, PLAN) is reloaded


@pytest.fixture
def several():
    """A model with the adapters `default` (active), `second` and `plain` (no rates), a batch, and their logits."""
    batch, model = inputs("llama"), trained_adapter("llama", seed=1)
    expected = {"default": logits(model, batch)}
    for name, config in (("second", with_rsa(LoraConfig())), ("plain", LoraConfig())):
        model.add_adapter(name, config)
        model.set_adapter(name)
        expected[name] = logits(disturb(model, seed=2), batch)
    model.set_adapter("default")
    return model, batch, expected


def test_adapters_keep_their_own_rates(several, tmp_path):
    model, batch, expected = several
    model.save_pretrained(tmp_path)
    loaded = load(base_model("llama"), tmp_path)
    for name in ("second", "plain"):
        loaded.load_adapter(str(tmp_path / name), name)
    gates = {}
    for name, wanted in expected.items():
        for each in (model, loaded):
            each.set_adapter(name)
            assert torch.equal(logits(each, batch), wanted)
        gates[name] = rsa_report(loaded).layers[0].heads[0].gate
    assert len(set(gates.values())) == 3
    assert gates["plain"] == pytest.approx(torch.tensor(PLAN.gate_init).sigmoid().item())
    assert torch.equal(logits(load(base_model("llama"), tmp_path / "second"), batch), expected["second"])
    loaded.set_adapter("second")
    loaded.delete_adapter("default")
    assert torch.equal(logits(loaded, batch), expected["second"])


def test_adapters_of_two_methods_keep_their_own_rates():
    batch, expected = inputs("llama"), {}
    model = peft.get_peft_model(patch_model(base_model("llama"), PLAN), with_rsa(LoraConfig()), mixed=True)
    model.add_adapter("second", with_rsa(LoHaConfig(target_modules=["q_proj"])))
    for name in ("default", "second"):
        model.set_adapter(name)
        expected[name] = logits(disturb(model), batch)
    for name, wanted in expected.items():
        model.set_adapter(name)
        assert torch.equal(logits(model, batch), wanted)
        torch.testing.assert_close(logits(copy.deepcopy(model).merge_and_unload(), batch), wanted)


def test_a_named_adapter_is_merged_with_its_own_rates(several):
    model, batch, expected = several
    with pytest.raises(ValueError, match="default, second each have gates and rates of their own: only one"):
        model.merge_and_unload(adapter_names=["default", "second"])
    assert torch.equal(logits(model, batch), expected["default"])
    torch.testing.assert_close(logits(model.merge_and_unload(adapter_names=["second"]), batch), expected["second"])


def test_only_the_active_adapter_is_merged_in_place(several):
    model, batch, expected = several
    for names in (["second"], ["default", "second"], ["plain"]):
        with pytest.raises(ValueError, match="merging in place keeps them"):
            model.merge_adapter(adapter_names=names)
    assert torch.equal(logits(model, batch), expected["default"])
    for active, names in (("default", ["default"]), ("default", None), ("second", ["second"])):
        model.set_adapter(active)
        model.merge_adapter(adapter_names=names)
        torch.testing.assert_close(logits(model, batch), expected[active])
        model.unmerge_adapter()


@pytest.mark.parametrize("method", ["lora", "ln tuning"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_disabled_adapter_leaves_the_model_as_patched(family, method):
    model, batch = disturb(get_peft_model(base_model(family), MERGED[method](), PLAN)), inputs(family)
    plain = logits(base_model(family), batch)
    as_patched = logits(patch_model(base_model(family), PLAN), batch)
    assert (plain - as_patched).abs().max() > 0.05
    with model.disable_adapter():
        assert torch.equal(logits(model, batch), as_patched)
        assert rsa_report(model).layers[0].heads[0].gate == pytest.approx(torch.tensor(0.5).sigmoid().item())
    assert not torch.equal(logits(model, batch), as_patched)
    assert torch.equal(logits(unpatch_model(model.unload()), batch), plain)


@pytest.mark.parametrize("method", [LoraConfig, IA3Config])
def test_gates_and_rates_have_no_weighted_sum(method):
    model, batch = disturb(get_peft_model(base_model("gpt2"), method(), PLAN)), inputs("gpt2")
    model.add_adapter("second", with_rsa(method()))
    expected = logits(model, batch)
    for name in ("one", "two"):
        model.add_adapter(name, method())
    for names in (["default", "second"], ["default", "one"]):
        with pytest.raises(ValueError, match="no weighted sum"):
            model.add_weighted_adapter(names, [0.5, 0.5], "sum")
    assert torch.equal(logits(model, batch), expected)
    model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "sum")  # untrained, so they change nothing
    model.set_adapter("sum")
    torch.testing.assert_close(logits(model, batch), logits(patch_model(base_model("gpt2"), PLAN), batch))


def test_reports_and_parameter_groups_see_through_the_wrapper():
    model = trained_adapter("gpt2")
    model.add_adapter("second", with_rsa(LoraConfig()))
    assert is_patched(model)
    report = rsa_report(model)
    assert report.layers[0].module == "base_model.model.transformer.h.0.attn"
    scale, values = PLAN.parameter_scale, adapter_values(model)
    mu = values["base_model.model.transformer.h.0.attn.rsa.modules_to_save.default.mu"]
    assert report.layers[0].heads[0].gate == pytest.approx(torch.sigmoid(mu * scale).item())
    groups = {group["name"]: group for group in param_groups(model, 1e-3, 0.1, rsa_learning_rate=0.02)}
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sorted(id(p) for group in groups.values() for p in group["params"]) == sorted(names)
    assert {names[id(p)] for p in groups["rsa"]["params"]} == set(values)
    assert (groups["rsa"]["lr"], groups["rsa"]["weight_decay"]) == (0.02 / scale, 0.0)


def test_patching_and_unpatching_a_peft_model_says_what_to_do():
    model, batch = trained_adapter("gpt2"), inputs("gpt2")
    before = logits(model, batch)
    base = model.get_base_model()
    for call, error, words in (
        (lambda: patch_model(model), TypeError, "got PeftModel.*rsa_hf.peft.get_peft_model"),
        (lambda: get_peft_model(model), TypeError, "got PeftModel.*model.add_adapter"),
        (lambda: unpatch_model(model), TypeError, r"got PeftModel.*unpatch_model\(model.merge_and_unload\(\)\)"),
        (lambda: unpatch_model(base), ValueError, r"PEFT holds the RSA heads.*unload\(\)"),
        (lambda: base.save_pretrained("nowhere"), ValueError, "wrapped by PEFT.*merge_and_unload"),
        (lambda: load(model, "nowhere"), TypeError, "model.load_adapter"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert torch.equal(logits(model, batch), before)
    plain = base_model("gpt2")
    plain.add_adapter(LoraConfig())
    with pytest.raises(ValueError, match=r"has PEFT adapters already.*merge_and_unload\(\) returns"):
        patch_model(plain)
    kept = patch_model(base_model("gpt2"), PLAN)  # transformers' own adapters have no merge_and_unload
    kept.add_adapter(with_rsa(LoraConfig()), "a")
    kept.delete_adapter("a")
    for call in (lambda: unpatch_model(kept), lambda: kept.save_pretrained("nowhere")):
        with pytest.raises(ValueError, match="delete_adapter.*load the base model again"):
            call()


def test_a_failure_in_peft_leaves_the_model_unchanged():
    model = base_model("gpt2")
    before = state_of(model)
    with pytest.raises(ValueError, match="No modules were targeted for adaptation"):
        get_peft_model(model, LoraConfig(target_modules=["no_such_layer"]))
    assert_same_state(model, before)


def test_a_new_head_is_trained_with_the_rates():
    base = AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]())
    model = get_peft_model(base, rsa_only_config("SEQ_CLS"))
    names = [name.split(".modules_to_save.")[0] for name, p in model.named_parameters() if p.requires_grad]
    trained = {name.rsplit(".", 1)[-1] for name in names}
    assert trained == {"rsa", "classifier"}
