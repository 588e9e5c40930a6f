"""An adapter never loses its RSA heads silently: another base, plan or file is an error, however it is loaded."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftModel
from peft import get_peft_model as plain_get_peft_model
from peft.config import PeftConfigMixin
from peft.utils.hotswap import hotswap_adapter
from transformers import AutoModelForCausalLM, BertModel, GPT2LMHeadModel

from families import CONFIGS, FULL_PLAN, inputs, move_rates
from file_edits import edit_json, edit_tensors
from hub_stand_in import USER
from peft_adapters import PLAN, base_model, disturb, logits, needs_own_adapters, trained_adapter
from rsa_hf import RSAConfig, is_patched, patch_model
from rsa_hf.integration.loading import _require_matching_keys
from rsa_hf.integration.peft import adapter_hooks
from rsa_hf.integration.peft.adapter_plan import describe_base, differing_weights
from rsa_hf.peft import get_peft_model, load, with_rsa

OTHER_PLAN = RSAConfig(**{**FULL_PLAN, "dilation": [2, 3, 7]})
NAMES = [f"transformer.h.{i}.attn.rsa.{name}" for i in (0, 1) for name in ("mu", "eta", "nu", "theta")]
FIRST = f"base_model.model.{NAMES[0]}"

WAYS = {
    "PeftModel.from_pretrained": PeftModel.from_pretrained,
    "PeftModel.load_adapter": lambda model, folder: plain_get_peft_model(model, LoraConfig()).load_adapter(
        folder, "b"
    ),
    "model.load_adapter": lambda model, folder: model.load_adapter(str(folder)),
}
ALL_WAYS = WAYS | {"rsa_hf.peft.load": load}


@pytest.fixture
def adapter(tmp_path):
    trained_adapter("gpt2").save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def edit_config(folder, change):
    edit_json(folder / "adapter_config.json", change)


def remove_plan(folder):
    """Make the config as PEFT without rsa_hf writes it."""
    edit_config(folder, lambda content: content.update(task_type=content.pop("rsa")["task_type"]))


def changed_gpt2(**changes):
    config = CONFIGS["gpt2"]()
    config.update(changes)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("written_by", ["rsa_hf", "plain peft"])
def test_a_plain_base_is_an_error(adapter, way, written_by):
    if written_by == "plain peft":
        remove_plan(adapter)
    model = base_model("gpt2")
    with pytest.raises(ValueError, match=r"no RSA heads|has none: they would be lost silently.*rsa_hf.peft.load"):
        WAYS[way](model, adapter)
    if way != "PeftModel.load_adapter":  # that one adds another adapter first
        assert list(model.state_dict()) == list(base_model("gpt2").state_dict())


def test_without_the_guard_peft_loses_the_heads_silently(adapter):
    remove_plan(adapter)
    batch = inputs("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_hooks, "require_fit", lambda *_: None)
        patch.setattr(adapter_hooks, "require_tensors", lambda *_: None)
        lost = PeftModel.from_pretrained(base_model("gpt2"), adapter)
    assert (logits(lost, batch) - logits(trained_adapter("gpt2"), batch)).abs().max() > 0.05


@pytest.mark.parametrize("way", ALL_WAYS)
def test_another_plan_is_an_error(adapter, way):
    model = patch_model(base_model("gpt2"), OTHER_PLAN)
    with pytest.raises(ValueError, match=r"another plan.*dilation: \[2, 3, 5\] → \[2, 3, 7\].*fresh copy"):
        ALL_WAYS[way](model, adapter)
    assert [name for name in model.state_dict() if ".rsa." in name] == NAMES or way == "PeftModel.load_adapter"
    assert model.config.rsa["plan"]["dilation"] == [2, 3, 7]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: changed_gpt2(n_embd=64), "hidden_size is 64, not 32"),
        (lambda: changed_gpt2(n_layer=3), "num_hidden_layers is 3, not 2"),
        (lambda: changed_gpt2(n_head=16), "num_attention_heads is 16, not 8"),
        (lambda: base_model("llama"), "model_type is 'llama', not 'gpt2'"),
        (lambda: torch.nn.Linear(2, 2), "for a gpt2, but this is a Linear|got Linear"),
    ],
)
@pytest.mark.parametrize("call", [load, PeftModel.from_pretrained])
def test_another_base_is_an_error(adapter, other, words, call):
    model = other()
    with pytest.raises((ValueError, TypeError), match=words):
        call(model, adapter)
    assert not is_patched(model)


# --- the base model -------------------------------------------------------------------------------------------------


@pytest.fixture
def bases(tmp_path):
    """The folders of an adapter and its base model, a batch, and the logits for it."""
    base_model("gpt2").save_pretrained(tmp_path / "base")
    model = disturb(get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(), PLAN))
    model.save_pretrained(tmp_path / "adapter")
    batch = inputs("gpt2")
    return tmp_path / "adapter", tmp_path / "base", batch, logits(model, batch)


def changed(folder, change):
    model = AutoModelForCausalLM.from_pretrained(folder)
    change(model)
    return model


SAME = {
    "moved": lambda folder: AutoModelForCausalLM.from_pretrained(folder.rename(folder.with_name("elsewhere"))),
    "without a name": lambda folder: base_model("gpt2"),
    "bfloat16": lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
    "more tokens": lambda folder: changed(folder, lambda model: model.resize_token_embeddings(105)),
}
OTHER = {
    "another seed": lambda folder: base_model("gpt2", seed=8),
    "fine-tuned": lambda folder: changed(folder, lambda model: [p.data.mul_(1.02) for p in model.parameters()]),
}


@pytest.mark.parametrize("written_by", ["this version", "0.1"])
@pytest.mark.parametrize("kind", SAME)
def test_the_base_is_recognised_by_its_weights(bases, kind, written_by):
    adapter, folder, batch, expected = bases
    if written_by == "0.1":
        edit_config(adapter, lambda content: content["rsa"]["base"].pop("weights"))
    loaded = load(SAME[kind](folder), adapter)
    if kind in ("moved", "without a name"):
        assert torch.equal(logits(loaded, batch), expected)


@pytest.mark.parametrize("kind", OTHER)
def test_other_weights_are_an_error(bases, kind):
    adapter, folder, *_ = bases
    words = r"trained on another base model: on .*base, and this one .*other weights"
    for call in (load, PeftModel.from_pretrained):
        other = OTHER[kind](folder)
        with pytest.raises(ValueError, match=words):
            call(other, adapter)
        assert not is_patched(other)
    other = OTHER[kind](folder)
    load(other, adapter, check_base_name=False).load_adapter(str(adapter), "default")
    edit_config(adapter, lambda content: content["rsa"]["base"].pop("weights"))
    load(OTHER[kind](folder), adapter)  # version 0.1 wrote only the type and the sizes


def test_other_weights_are_an_error_under_prompt_learning(tmp_path):
    trained_adapter("gpt2", "prompt").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="another base model"):
        PeftModel.from_pretrained(patch_model(base_model("gpt2", seed=8), PLAN), tmp_path)


def test_one_new_part_does_not_make_another_base():
    one, other = (BertModel(CONFIGS["bert"]()) for _ in range(2))
    base = describe_base(one.requires_grad_(False))
    new = next(iter(base["weights"]))
    other.load_state_dict({**one.state_dict(), new: torch.randn_like(one.get_parameter(new))})
    assert differing_weights(base, other) == []
    assert len(differing_weights(base, BertModel(CONFIGS["bert"]()))) > len(base["weights"]) / 2


def test_weights_that_adapters_change_are_not_compared():
    """LoRA is merged into the layers that it wraps, and biases may be trained with it."""
    model = disturb(get_peft_model(base_model("gpt2"), LoraConfig(target_modules="all-linear", bias="all"), PLAN))
    base = model.get_base_model()
    before = describe_base(base)
    assert set(before["weights"]) == {"wte.weight", "wpe.weight"}
    model.merge_adapter()
    assert describe_base(base) == before
    alone = describe_base(get_peft_model(base_model("gpt2"), None, PLAN).get_base_model())
    assert len(alone["weights"]) > len(before["weights"])


# --- tensors and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(FIRST), rf"missing from the adapter: {NAMES[0]}"),
        (lambda t: [t.pop(key) for key in list(t) if ".rsa." in key], r"missing from the adapter.*\(8 in all\)"),
        (lambda t: t.update({FIRST.replace("h.0", "h.7"): t[FIRST].clone()}), "not in the model: transformer.h.7"),
        (lambda t: t.update({FIRST: torch.ones(3)}), r"mu has shape \(3,\) in the adapter, \(1,\) in the model"),
    ],
)
def test_a_damaged_weights_file_is_an_error(adapter, change, words):
    edit_tensors(adapter / "adapter_model.safetensors", change)
    for way in ALL_WAYS.values():
        with pytest.raises(ValueError, match=words):
            way(patch_model(base_model("gpt2"), PLAN), adapter)
    with pytest.raises(ValueError, match=words):
        load(base_model("gpt2"), adapter)


OVER = {
    "PeftModel.load_adapter": lambda model, folder: model.load_adapter(str(folder), "default"),
    "model.load_adapter": lambda model, folder: model.load_adapter(str(folder), "default", hotswap=True),
    "hotswap_adapter": lambda model, folder: hotswap_adapter(model, str(folder), "default", "cpu"),
}


def with_native_adapter():
    model = patch_model(base_model("gpt2"), PLAN)
    model.add_adapter(with_rsa(LoraConfig(target_modules="all-linear")), "default")
    return model


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[needs_own_adapters] * way.startswith("model")) for way in OVER]
)
def test_an_adapter_is_only_replaced_by_one_that_fits(way, adapter, tmp_path):
    trained_adapter("gpt2", plan=OTHER_PLAN).save_pretrained(tmp_path / "other plan")
    model = with_native_adapter() if way.startswith("model") else trained_adapter("gpt2", seed=2)
    batch = inputs("gpt2")
    with pytest.raises(ValueError, match="another plan"):
        OVER[way](model, tmp_path / "other plan")
    expected = logits(trained_adapter("gpt2"), batch)
    assert (logits(model, batch) - expected).abs().max() > 0.01
    OVER[way](model, adapter)
    assert torch.equal(logits(model, batch), expected)
    edit_tensors(adapter / "adapter_model.safetensors", lambda tensors: tensors.pop(FIRST))
    with pytest.raises(ValueError, match=f"missing from the adapter: {NAMES[0]}"):
        OVER[way](model, adapter)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rsa: rsa["plan"].update(num_regularr=1), "unknown RSA setting 'num_regularr'.*num_regular"),
        (lambda rsa: rsa.update(format_version=9), "format_version 9"),
        (lambda rsa: rsa.pop("base"), "mapping `base`"),
        (lambda rsa: rsa["base"].update(hidden_size="32"), "another base model.*hidden_size is 32, not '32'"),
        (lambda rsa: rsa["base"].update(weights={"wte.weight": [1, "a"]}), "lists of finite numbers"),
    ],
)
def test_a_damaged_config_is_an_error(adapter, change, words):
    edit_config(adapter, lambda content: change(content["rsa"]))
    for call in (load, PeftModel.from_pretrained):
        with pytest.raises((ValueError, TypeError), match=words):
            call(patch_model(base_model("gpt2"), PLAN), adapter)


def test_a_new_adapter_with_rates_needs_a_patched_model():
    model = base_model("gpt2")
    with pytest.raises(ValueError, match="has none.*rsa_hf.peft.get_peft_model, or call patch_model first"):
        plain_get_peft_model(model, with_rsa(LoraConfig()))
    assert list(model.state_dict()) == list(base_model("gpt2").state_dict())


def test_trained_rates_that_no_adapter_holds_cannot_be_saved(tmp_path):
    model = plain_get_peft_model(patch_model(base_model("gpt2"), PLAN), LoraConfig())
    model.save_pretrained(tmp_path / "frozen")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".rsa." in name or "lora_" in name)
    with pytest.raises(ValueError, match=r"h.0.attn.rsa, …\) are trained, but no adapter holds them"):
        model.save_pretrained(tmp_path / "trained")
    # The frozen adapter needs a patched base, and load does not patch one for it.
    assert "rsa" in json.loads((tmp_path / "frozen" / "adapter_config.json").read_text())
    with pytest.raises(ValueError, match="has none"):
        PeftModel.from_pretrained(base_model("gpt2"), tmp_path / "frozen")
    with pytest.raises(ValueError, match="was trained on a patched model and holds no gates and rates"):
        load(base_model("gpt2"), tmp_path / "frozen")
    load(patch_model(base_model("gpt2"), PLAN), tmp_path / "frozen")
    with pytest.raises(ValueError, match="trained with others than this model has"):
        PeftModel.from_pretrained(move_rates(patch_model(base_model("gpt2"), PLAN)), tmp_path / "frozen")


def test_adapters_that_would_lose_rates_are_refused(tmp_path):
    model = get_peft_model(base_model("gpt2"), LoraConfig(init_lora_weights="olora"), PLAN)
    with pytest.raises(ValueError, match="gates and rates would be lost"):
        model.save_pretrained(tmp_path, path_initial_model_for_weight_conversion=str(tmp_path))
    with pytest.raises(ValueError, match="with RSA heads in it"):
        get_peft_model(base_model("gpt2"), LoraConfig(modules_to_save=["attn"]), PLAN)


def test_plain_adapters_load_as_without_rsa_hf(tmp_path):
    model, batch = plain_get_peft_model(base_model("gpt2"), LoraConfig(task_type="CAUSAL_LM")), inputs("gpt2")
    disturb(model).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "rsa" not in content
    assert content["task_type"] == "CAUSAL_LM"
    assert type(model.base_model) is LoraModel
    assert torch.equal(logits(PeftModel.from_pretrained(base_model("gpt2"), tmp_path), batch), logits(model, batch))
    with pytest.raises(ValueError, match="does not say which RSA heads it is for"):
        load(base_model("gpt2"), tmp_path)
    # They also load onto a patched base, where nothing is lost.
    for way in WAYS.values():
        way(patch_model(base_model("gpt2"), PLAN), tmp_path)


def test_an_adapter_is_uploaded_with_its_plan(hub, tmp_path):
    """As transformers saves it, save_pretrained(push_to_hub=True) uploads before it returns."""
    folder, repo = tmp_path / "adapter", f"{USER}/adapter"
    with_native_adapter().save_pretrained(folder, push_to_hub=True, repo_id=repo)
    content = json.loads(hub.files(repo)["adapter_config.json"])
    assert content["rsa"]["base"]["model_type"] == "gpt2"
    assert content == json.loads((folder / "adapter_config.json").read_text())
    trained_adapter("gpt2").push_to_hub(f"{USER}/pushed")
    assert json.loads(hub.files(f"{USER}/pushed")["adapter_config.json"])["rsa"] == content["rsa"]


def test_the_lock_stops_a_peft_without_rsa_hf(adapter, monkeypatch):
    original = PeftConfigMixin.from_peft_type.__func__.__wrapped__
    monkeypatch.setattr(PeftConfigMixin, "from_peft_type", classmethod(original))
    with pytest.raises(ValueError, match="Invalid task type: 'rsa_hf .this adapter has RSA heads: pip install rsa_hf"):
        PeftModel.from_pretrained(patch_model(base_model("gpt2"), PLAN), adapter)


def test_a_transformers_that_does_not_load_the_rates_is_an_error():
    model = base_model("gpt2")
    model.add_adapter(LoraConfig())
    info = SimpleNamespace(missing_keys=set(), unexpected_keys={FIRST}, mismatched_keys=set())
    with pytest.raises(ValueError, match=r"in the checkpoint, but not in the plan.*rsa_hf.peft.load"):
        _require_matching_keys(model, info)
