"""PEFT chooses the layers of a patched model as it does those of the plain one, and may replicate them."""

import peft
import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from families import inputs
from peft_adapters import PLAN, adapter_values, base_model, disturb, logits
from rsa_hf import patch_model, rsa_report, unpatch_model
from rsa_hf.peft import get_peft_model, load, with_rsa

# --- which modules get a layer -------------------------------------------------------------------------------------

# Of each family a pattern that fits all linear layers of attention by their place, not by their names.
PATTERNS = {
    "llama": r"model\.layers\.\d+\.self_attn\..*",
    "gpt2": r".*\.attn\.(?!.*dropout).*",
    "bert": r".*\.attention\.self\.(?!dropout).*",
}
CHOICES = {
    "lora": ("llama", lambda: LoraConfig(target_modules=PATTERNS["llama"])),
    "lora, gpt2": ("gpt2", lambda: LoraConfig(target_modules=PATTERNS["gpt2"], fan_in_fan_out=True)),
    "lora, bert": ("bert", lambda: LoraConfig(target_modules=PATTERNS["bert"])),
    "ia3": ("llama", lambda: IA3Config(target_modules=PATTERNS["llama"], feedforward_modules=[])),
    "ln tuning": ("llama", lambda: LNTuningConfig(target_modules=r".*layernorm")),
    "all-linear": ("llama", lambda: LoraConfig(target_modules="all-linear")),
    "one layer": ("llama", lambda: LoraConfig(target_modules=["q_proj"], layers_to_transform=[1])),
    "excluded pattern": ("llama", lambda: LoraConfig(target_modules=PATTERNS["llama"], exclude_modules=".*k_proj")),
    "ranks": ("llama", lambda: LoraConfig(target_modules=PATTERNS["llama"], rank_pattern={"0.self_attn.*": 3})),
    "parameters": ("llama", lambda: LoraConfig(target_modules=[], target_parameters=["k_proj.weight"])),
}


def directly(family, config):
    with pytest.warns(UserWarning, match="trains no gates and rates"):
        return peft.get_peft_model(patch_model(base_model(family), PLAN), config)


WAYS = {
    "rsa_hf.peft": lambda family, config: get_peft_model(base_model(family), config, PLAN),
    "with_rsa": lambda family, config: peft.get_peft_model(patch_model(base_model(family), PLAN), with_rsa(config)),
    "peft": directly,
}


def adapted(model):
    """The shapes of the parameters that an adapter adds, except gates and rates, by name."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: parameter.shape for name, parameter in trained if ".rsa." not in name}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("choice", CHOICES)
def test_the_same_layers_are_adapted_as_on_the_plain_model(choice, way, recwarn):
    family, config = CHOICES[choice]
    expected = adapted(peft.get_peft_model(base_model(family), config()))
    assert expected
    model = WAYS[way](family, config())
    assert adapted(model) == expected
    rates = {name: parameter for name, parameter in model.named_parameters() if ".rsa." in name}
    trained = {name for name, parameter in rates.items() if parameter.requires_grad}
    assert trained == set(adapter_values(model))
    assert bool(trained) is (way != "peft")
    assert {name.split(".")[-1] for name in rates} == {"mu", "eta", "nu", "theta"}


@pytest.mark.parametrize("with_heads", [True, False])
def test_a_second_adapter_is_put_on_the_same_layers(with_heads):
    """Its pattern also fits PEFT's wrapper round the heads, and the copies in it."""
    config = LoraConfig(target_modules=PATTERNS["llama"])
    expected = adapted(peft.get_peft_model(base_model("llama"), LoraConfig(target_modules=PATTERNS["llama"])))
    model = get_peft_model(base_model("llama"), None, PLAN)
    model.add_adapter("second", with_rsa(config) if with_heads else config)
    model.set_adapter("second")
    assert {name.replace(".second.", ".default."): shape for name, shape in adapted(model).items()} == expected


# --- replicated layers ---------------------------------------------------------------------------------------------

TARGETS = {"llama": ["q_proj", "up_proj"], "mistral": ["k_proj", "v_proj"], "bert": ["query", "dense"]}
ORDER = [1, 0, 1]  # of the layers, which layer_replication=[[1, 2], [0, 2]] gives


def replicating(family="llama"):
    return LoraConfig(target_modules=TARGETS[family], layer_replication=[[1, 2], [0, 2]])


def trained(family="llama"):
    torch.manual_seed(0)
    return disturb(get_peft_model(base_model(family), replicating(family), PLAN))


def by_hand(family, model):
    """Build the model without PEFT: with the layers in their order, W + B A, and the rates of each."""
    plain = base_model(family)
    weights, config = plain.state_dict(), plain.config
    config.num_hidden_layers = len(ORDER)
    built = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    place = ".layer." if family == "bert" else ".layers."
    with torch.no_grad():
        for name, value in built.state_dict().items():
            before, found, after = name.partition(place)
            number, _, rest = after.partition(".")
            value.copy_(weights[f"{before}{place}{ORDER[int(number)]}.{rest}" if found else name])
        patch_model(built, PLAN)
        state = model.state_dict()
        for name, module in built.named_modules():
            prefix = f"base_model.model.{name}."
            if f"{prefix}lora_A.default.weight" in state:  # r = α
                module.weight += state[f"{prefix}lora_B.default.weight"] @ state[f"{prefix}lora_A.default.weight"]
        for name, parameter in built.named_parameters():
            if ".rsa." in name:
                before, _, last = name.rpartition(".")
                parameter.copy_(state[f"base_model.model.{before}.modules_to_save.default.{last}"])
    return built


@pytest.mark.parametrize("family", TARGETS)
def test_replicated_layers_have_heads_of_their_own_and_load(family, tmp_path):
    model, batch = trained(family), inputs(family)
    expected, reference = logits(model, batch), by_hand(family, model)
    torch.testing.assert_close(logits(reference, batch), expected, atol=1e-5, rtol=1e-5)
    gates = [layer.heads[0].gate for layer in rsa_report(model).layers]
    assert len(set(gates)) == len(gates) == 3
    model.save_pretrained(tmp_path)
    onto_plain = load(base_model(family), tmp_path)
    onto_patched = PeftModel.from_pretrained(patch_model(base_model(family), PLAN), tmp_path)
    for loaded in (onto_plain, onto_patched, load(base_model(family), tmp_path, is_trainable=True).eval()):
        assert torch.equal(logits(loaded, batch), expected)
    # The reference sees it if replicated layers had the gates and rates of one.
    with torch.no_grad():
        heads = [module for name, module in reference.named_modules() if name.endswith(".rsa")]
        for module in heads:
            for name, parameter in module.named_parameters():
                parameter.copy_(getattr(heads[0], name))
    assert (logits(reference, batch) - expected).abs().max() > 0.01


def test_replicated_layers_are_not_merged(tmp_path):
    """They share the weights that LoRA would be merged into. PEFT's own check does not see them."""
    model, batch = trained(), inputs("llama")
    with pytest.raises(ValueError, match="layer_replication"):
        model.merge_and_unload()
    unloaded = model.unload()
    with pytest.raises(ValueError, match="not those of its plan.*Were layers dropped, added or moved"):
        unloaded.save_pretrained(tmp_path)
    alone = peft.get_peft_model(base_model("llama"), replicating()).eval()
    assert torch.equal(logits(unpatch_model(unloaded), batch), logits(alone, batch))
