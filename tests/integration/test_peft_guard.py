"""An adapter never loses its RSA heads in silence: another base, plan or file is an error, whichever way it is loaded."""

import json
import pickle
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from peft import get_peft_model as plain_get_peft_model
from peft.config import PeftConfigMixin
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import rsa_hf.integration.peft.hooks as peft_hooks
from families import CONFIGS, FULL_PLAN, inputs
from peft_adapters import METHODS, PLAN, adapter_values, base_model, disturb, logits, trained_adapter
from rsa_hf import RSAConfig, is_patched, patch_model
from rsa_hf.integration.loading import _require_matching_keys
from rsa_hf.peft import get_peft_model, load, with_rsa

OTHER_PLAN = RSAConfig(**{**FULL_PLAN, "dilation": [2, 3, 7]})
NAMES = [f"transformer.h.{i}.attn.rsa.{name}" for i in (0, 1) for name in ("mu", "eta", "nu", "theta")]
FIRST = f"base_model.model.{NAMES[0]}"

WAYS = {
    "PeftModel.from_pretrained": lambda model, folder: PeftModel.from_pretrained(model, folder),
    "PeftModel.load_adapter": lambda model, folder: plain_get_peft_model(model, LoraConfig()).load_adapter(
        folder, "b"
    ),
    "model.load_adapter": lambda model, folder: model.load_adapter(str(folder)),
}


@pytest.fixture
def adapter(tmp_path):
    trained_adapter("gpt2").save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def edit_config(folder, change):
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def without_a_plan(folder):
    """As a PEFT without rsa_hf writes it."""
    edit_config(folder, lambda content: content.update(task_type=content.pop("rsa")["task_type"]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("written_by", ["rsa_hf", "plain peft"])
def test_an_unpatched_base(adapter, way, written_by):
    if written_by == "plain peft":
        without_a_plan(adapter)
    model = base_model("gpt2")
    with pytest.raises(ValueError, match=r"no RSA heads|has none: they would be lost in silence.*rsa_hf.peft.load"):
        WAYS[way](model, adapter)
    if way != "PeftModel.load_adapter":  # that one adds an adapter of its own first
        assert list(model.state_dict()) == list(base_model("gpt2").state_dict())


def test_without_the_guard_peft_says_nothing_and_the_heads_are_gone(adapter):
    without_a_plan(adapter)
    batch = inputs("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft_hooks, "require_fit", lambda *_: None)
        patch.setattr(peft_hooks, "require_tensors", lambda *_: None)
        lost = PeftModel.from_pretrained(base_model("gpt2"), adapter)
    assert (logits(lost, batch) - logits(trained_adapter("gpt2"), batch)).abs().max() > 0.05


@pytest.mark.parametrize("way", WAYS)
def test_another_plan(adapter, way):
    model = patch_model(base_model("gpt2"), OTHER_PLAN)
    with pytest.raises(ValueError, match=r"another plan.*dilation: \[2, 3, 5\] → \[2, 3, 7\].*fresh copy"):
        WAYS[way](model, adapter)
    assert [name for name in model.state_dict() if ".rsa." in name] == NAMES or way == "PeftModel.load_adapter"


def test_load_takes_no_other_plan_either(adapter):
    model = patch_model(base_model("gpt2"), OTHER_PLAN)
    with pytest.raises(ValueError, match="another plan"):
        load(model, adapter)
    assert model.config.rsa["plan"]["dilation"] == [2, 3, 7]


def build_other(**changes):
    config = CONFIGS["gpt2"]()
    for name, value in changes.items():
        setattr(config, name, value)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: build_other(n_embd=64), "hidden_size is 64, not 32"),
        (lambda: build_other(n_layer=3), "num_hidden_layers is 3, not 2"),
        (lambda: build_other(n_head=16), "num_attention_heads is 16, not 8"),
        (lambda: base_model("llama"), "model_type is 'llama', not 'gpt2'"),
        (lambda: torch.nn.Linear(2, 2), "for a gpt2, but this is a Linear"),
    ],
)
def test_another_base(adapter, other, words):
    for call in (load, PeftModel.from_pretrained):
        model = other()
        if call is load and not hasattr(model, "config"):
            continue
        with pytest.raises(ValueError, match=words):
            call(model, adapter)
        assert not is_patched(model)


def test_another_name_of_the_base(tmp_path):
    for name in ("one", "two"):
        base_model("gpt2").save_pretrained(tmp_path / name)
    one, two = (lambda name=name: AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    model, batch = disturb(get_peft_model(one(), LoraConfig(), PLAN)), inputs("gpt2")
    model.save_pretrained(tmp_path / "adapter")
    for call in (load, PeftModel.from_pretrained):
        other = two()
        with pytest.raises(ValueError, match="trained on the base model.*one'.*called.*two'.*check_base_name=False"):
            call(other, tmp_path / "adapter")
        assert not is_patched(other)
    for loaded in (
        load(one(), tmp_path / "adapter"),
        load(two(), tmp_path / "adapter", check_base_name=False),
        load(base_model("gpt2"), tmp_path / "adapter"),  # built from a config: it has no name
    ):
        assert torch.equal(logits(loaded, batch), logits(model, batch))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(FIRST), rf"missing from the adapter: {NAMES[0]}"),
        (lambda t: [t.pop(key) for key in list(t) if ".rsa." in key], r"missing from the adapter.*\(8 in all\)"),
        (
            lambda t: t.update({FIRST.replace("h.0", "h.7"): t[FIRST].clone()}),
            r"not in the model: transformer.h.7.attn.rsa.mu",
        ),
        (lambda t: t.update({FIRST: torch.ones(3)}), r"mu has shape \(3,\) in the adapter, \(1,\) in the model"),
        (lambda t: t.update({FIRST: torch.tensor([torch.nan])}), r"rsa.mu is \[nan\]"),
        (lambda t: t.update({FIRST[:-2] + "nu": torch.tensor([0.0, torch.inf])}), r"rsa.nu is \[0.0, inf\]"),
    ],
)
def test_a_damaged_file(adapter, change, words):
    edit_tensors(adapter, change)
    for way in (*WAYS.values(), load):
        model = patch_model(base_model("gpt2"), PLAN)
        with pytest.raises(ValueError, match=words):
            way(model, adapter)
    model = base_model("gpt2")
    with pytest.raises(ValueError, match=words):
        load(model, adapter)
    assert list(model.state_dict()) != []


def test_tensors_set_by_hand_are_checked(adapter):
    model, tensors = trained_adapter("gpt2", seed=2), load_peft_weights(str(adapter), device="cpu")
    before = adapter_values(model)
    missing = {key: value for key, value in tensors.items() if key != FIRST}
    for bad, words in ((missing, "missing from the adapter"), ({**tensors, FIRST: torch.ones(2)}, "has shape")):
        with pytest.raises(ValueError, match=words):
            set_peft_model_state_dict(model, bad)
        assert all(torch.equal(value, before[name]) for name, value in adapter_values(model).items())
    set_peft_model_state_dict(model, tensors)
    batch = inputs("gpt2")
    assert torch.equal(logits(model, batch), logits(trained_adapter("gpt2"), batch))


def test_hot_swapping_is_as_strict(adapter, tmp_path):
    model, batch = trained_adapter("gpt2", seed=2), inputs("gpt2")
    before = logits(model, batch)
    trained_adapter("gpt2", plan=OTHER_PLAN).save_pretrained(tmp_path / "other plan")
    plain_get_peft_model(base_model("gpt2"), LoraConfig(target_modules="all-linear")).save_pretrained(
        tmp_path / "no rsa"
    )
    edit_tensors(adapter, lambda tensors: tensors.pop(FIRST))
    for folder, words in (
        (tmp_path / "other plan", "another plan"),
        (tmp_path / "no rsa", r"missing from the adapter.*\(8 in all\)"),
        (adapter, f"missing from the adapter: {NAMES[0]}"),
    ):
        with pytest.raises(ValueError, match=words):
            hotswap_adapter(model, str(folder), adapter_name="default", torch_device="cpu")
        assert torch.equal(logits(model, batch), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rsa: rsa["plan"].update(num_regularr=1), "unknown RSA setting 'num_regularr'.*num_regular"),
        (lambda rsa: rsa["plan"].update(dilation=[0, 1, 2]), "dilation=0"),
        (lambda rsa: rsa.update(modules=["__class__"]), "no module name"),
        (lambda rsa: rsa.update(format_version=9), "format_version 9"),
        (lambda rsa: rsa.pop("base"), "mapping `base`"),
        (lambda rsa: rsa["base"].update(hidden_size="32"), "hidden_size='32': a whole number"),
        (lambda rsa: rsa["base"].update(run="rm"), "base in adapter_config.json has 'run'"),
        (lambda rsa: rsa["base"].update(name=3), "name=3"),
    ],
)
def test_a_damaged_config(adapter, change, words):
    edit_config(adapter, lambda content: change(content["rsa"]))
    for call in (load, PeftModel.from_pretrained):
        with pytest.raises((ValueError, TypeError), match=words):
            call(patch_model(base_model("gpt2"), PLAN), adapter)


def test_a_pickle_is_not_executed(adapter):
    (adapter / "adapter_model.safetensors").unlink()

    class Payload:
        def __reduce__(self):
            return (open, (str(adapter / "executed"), "w"))

    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({FIRST: Payload()}))
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load(base_model("gpt2"), adapter)
    assert not (adapter / "executed").exists()


@pytest.mark.parametrize("method", ["lora", "prompt"])
def test_a_new_adapter_with_rates_needs_a_patched_model(method):
    model = base_model("gpt2")
    with pytest.raises(ValueError, match="has none.*rsa_hf.peft.get_peft_model, or call patch_model first"):
        plain_get_peft_model(model, with_rsa(METHODS[method]()))
    assert list(model.state_dict()) == list(base_model("gpt2").state_dict())


def test_rates_that_no_adapter_holds_are_not_saved_as_if_they_were(tmp_path):
    model = plain_get_peft_model(patch_model(base_model("gpt2"), PLAN), LoraConfig())
    model.save_pretrained(tmp_path / "frozen")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".rsa." in name or "lora_" in name)
    with pytest.raises(ValueError, match=r"h.0.attn.rsa, …\) are trained, but no adapter holds them"):
        model.save_pretrained(tmp_path / "trained")
    # The frozen one says that it needs a patched base, and does not make one up.
    assert "rsa" in json.loads((tmp_path / "frozen" / "adapter_config.json").read_text())
    with pytest.raises(ValueError, match="has none"):
        PeftModel.from_pretrained(base_model("gpt2"), tmp_path / "frozen")
    with pytest.raises(ValueError, match="was trained on a patched model and holds no gates and rates"):
        load(base_model("gpt2"), tmp_path / "frozen")
    load(patch_model(base_model("gpt2"), PLAN), tmp_path / "frozen")


def test_plain_adapters_are_left_alone(tmp_path):
    model, batch = plain_get_peft_model(base_model("gpt2"), LoraConfig(task_type="CAUSAL_LM")), inputs("gpt2")
    disturb(model).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "rsa" not in content
    assert content["task_type"] == "CAUSAL_LM"
    assert torch.equal(logits(PeftModel.from_pretrained(base_model("gpt2"), tmp_path), batch), logits(model, batch))
    with pytest.raises(ValueError, match="does not say which RSA heads it is for"):
        load(base_model("gpt2"), tmp_path)
    # On a patched base too: nothing of it is lost there, and `model.load_adapter` takes it.
    patched = patch_model(base_model("gpt2"), PLAN)
    patched.load_adapter(str(tmp_path))
    PeftModel.from_pretrained(patch_model(base_model("gpt2"), PLAN), tmp_path)


def test_one_config_can_be_used_for_several_models():
    config = LoraConfig()
    for plan in (PLAN, OTHER_PLAN):
        get_peft_model(base_model("gpt2"), config, plan)
    shared = with_rsa(config)
    for plan in (PLAN, OTHER_PLAN):
        plain_get_peft_model(patch_model(base_model("gpt2"), plan), shared)


def test_a_failed_save_leaves_no_config_without_its_lock(tmp_path, monkeypatch):
    model = trained_adapter("gpt2")
    monkeypatch.setattr(peft_hooks.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"README.md", "adapter_model.safetensors"}


def test_the_lock_stops_a_peft_without_rsa_hf(adapter, monkeypatch):
    monkeypatch.setattr(
        PeftConfigMixin, "from_json_file", PeftConfigMixin.from_json_file.__func__.__wrapped__.__get__(PeftConfigMixin)
    )
    monkeypatch.setattr(
        PeftConfigMixin, "from_peft_type", PeftConfigMixin.from_peft_type.__func__.__wrapped__.__get__(PeftConfigMixin)
    )
    with pytest.raises(ValueError, match="Invalid task type: 'rsa_hf .this adapter has RSA heads: pip install rsa_hf"):
        PeftModel.from_pretrained(patch_model(base_model("gpt2"), PLAN), adapter)


def test_a_transformers_that_would_drop_the_rates_is_named():
    model = base_model("gpt2")
    model.add_adapter(LoraConfig())
    info = SimpleNamespace(missing_keys=set(), unexpected_keys={FIRST}, mismatched_keys=set())
    with pytest.raises(
        ValueError, match=r"transformers \d.* does not load the gates and rates of an adapter.*rsa_hf.peft.load"
    ):
        _require_matching_keys(model, info)


ARMED = """
    import sys
    {first}
    {second}
    from peft import PeftModel
    from transformers import GPT2Config, GPT2LMHeadModel
    assert hasattr(PeftModel.load_adapter, "_rsa_hf_wrappers") is {guarded}
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=8, vocab_size=97, n_positions=128))
    try:
        PeftModel.from_pretrained(model, {folder!r})
    except ValueError as error:
        print(error)
    else:
        raise SystemExit("loaded all the same")
"""


@pytest.mark.slow  # each starts an interpreter and imports torch, transformers and peft
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("import rsa_hf", "import peft", "lost in silence"),
        ("import peft", "import rsa_hf", "lost in silence"),
        (
            "import rsa_hf",
            "from transformers.utils import is_peft_available; assert is_peft_available()",
            "lost in silence",
        ),
        ("import rsa_hf", "from peft.utils import set_peft_model_state_dict", "lost in silence"),
        ("import rsa_hf.peft", "", "lost in silence"),
        ("import peft", "", "pip install rsa_hf, then import rsa_hf before loading it"),
    ],
)
def test_the_guard_is_armed_whatever_is_imported_first(adapter, first, second, words):
    code = textwrap.dedent(ARMED).format(
        first=first, second=second, guarded="rsa_hf" in first + second, folder=str(adapter)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
