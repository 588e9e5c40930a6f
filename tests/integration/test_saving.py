"""Checkpoints: what goes in comes out bit for bit, and what does not fit is refused by name."""

import copy
import json
import math
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    MllamaForCausalLM,
    MllamaTextConfig,
    PreTrainedModel,
    RobertaModel,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from families import CONFIGS, FAMILIES, FULL_PLAN, build, build_language_model, inputs
from rsa_hf import RSAConfig, RSAHeads, is_patched, patch_model, rsa_report, unpatch_model


def trained(model, plan=None):
    """A patched model whose gates and rates are not where they started."""
    patch_model(model, RSAConfig(**(FULL_PLAN if plan is None else plan)))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, RSAHeads):
                for parameter in module.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model.eval()


@pytest.fixture
def saved(tmp_path):
    model = trained(build("roberta"))
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_auto_model_gives_the_same_bits(family, tmp_path):
    model, batch = trained(build(family)), inputs(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(**batch)[0], model(**batch)[0])
    assert loaded.config.rsa == model.config.rsa
    assert str(rsa_report(loaded)) == str(rsa_report(model))
    # Saved again it is the same again.
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "again")(**batch)[0], model(**batch)[0])


@pytest.mark.parametrize("how", ["concrete class", "deepcopy", "pickle"])
@torch.no_grad()
def test_classes_and_copies(how, saved):
    model, folder = saved
    batch = inputs("roberta")
    if how == "concrete class":
        loaded = RobertaModel.from_pretrained(folder)
    elif how == "deepcopy":
        loaded = copy.deepcopy(model)
    else:
        loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(**batch)[0], model(**batch)[0])


@torch.no_grad()
def test_other_heads_on_the_same_base(tmp_path):
    model = trained(AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]()))
    model.save_pretrained(tmp_path)
    batch = inputs("roberta")
    expected = model.roberta(**batch).last_hidden_state
    assert torch.equal(
        AutoModelForSequenceClassification.from_pretrained(tmp_path)(**batch).logits, model(**batch).logits
    )
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(**batch).last_hidden_state, expected)
    causal = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(causal.roberta(**batch).last_hidden_state, expected)


@torch.no_grad()
def test_one_half_of_an_encoder_decoder(tmp_path):
    model = trained(build_language_model("t5"))
    model.save_pretrained(tmp_path)
    ids = inputs("t5")["input_ids"]
    half = T5EncoderModel.from_pretrained(tmp_path)
    assert torch.equal(half(input_ids=ids)[0], model.encoder(input_ids=ids)[0])
    assert isinstance(T5ForConditionalGeneration.from_pretrained(tmp_path), T5ForConditionalGeneration)


@torch.no_grad()
def test_lower_precision_keeps_rates_in_float32(saved):
    model, folder = saved
    loaded = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    weights = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        if ".rsa." in name:
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, weights[name])
        else:
            assert parameter.dtype == torch.bfloat16


def test_a_new_model_from_the_config_starts_as_the_plan_says(saved):
    _, folder = saved
    fresh = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    assert is_patched(fresh)
    gate = fresh.encoder.layer[0].attention.self.rsa.rates()["gate"]
    torch.testing.assert_close(gate, torch.sigmoid(torch.tensor([FULL_PLAN["gate_init"]])))


@pytest.mark.parametrize("initialise", [False, True])
def test_a_model_built_on_the_meta_device_starts_as_the_plan_says(initialise, saved):
    _, folder = saved
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    model.to_empty(device="cpu")
    if initialise:
        model.init_weights()
    expected = AutoModel.from_config(config).state_dict()
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items() if ".rsa." in name)


WAYS_TO_LOAD = [
    "AutoModel.from_pretrained(path)",
    "RobertaModel.from_pretrained(path)",
    "AutoModel.from_config(AutoConfig.from_pretrained(path))",
    "AutoModel.from_pretrained(path, attn_implementation='sdpa')",
    "pipeline('feature-extraction', model=path)",
]


def test_without_rsa_hf_the_checkpoint_does_not_load(saved):
    _, folder = saved
    # One process for all of them: importing transformers takes most of its time.
    code = f"""
        import json, sys
        from transformers import AutoConfig, AutoModel, RobertaModel, pipeline
        assert "rsa_hf" not in sys.modules
        path, messages = {str(folder)!r}, []
        for way in {WAYS_TO_LOAD!r}:
            try:
                eval(way)
                messages.append("loaded")
            except Exception as error:
                messages.append(str(error))
        print(json.dumps(messages))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    messages = dict(zip(WAYS_TO_LOAD, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for way, message in messages.items():
        assert "pip install rsa_hf, then import rsa_hf" in message, way


def test_locks_are_in_the_file_and_not_in_memory(saved):
    model, folder = saved
    content = json.loads((folder / "config.json").read_text())
    assert content["attn_implementation"].startswith("rsa_hf")
    assert all(name.startswith("rsa_hf") for name in content["fusion_config"])
    assert content["model_type"] == "roberta"
    for config in (model.config, AutoConfig.from_pretrained(folder)):
        assert config._attn_implementation in ("sdpa", None)
        assert not hasattr(config, "fusion_config")
    assert [path.name for path in folder.glob("*.tmp")] == []


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, change):
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


LAYER = "encoder.layer.1.attention.self.rsa"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(f"{LAYER}.mu"), f"missing from the checkpoint: {LAYER}.mu"),
        (
            lambda w: w.update({"encoder.layer.0.attention.self.rsa.mu": torch.zeros(3)}),
            r"rsa.mu has shape \(3,\).*\(1,\)",
        ),
        (
            lambda w: w.update({"pooler.rsa.eta": torch.zeros(2)}),
            "in the checkpoint, but not in the plan: pooler.rsa.eta",
        ),
        (lambda w: w[f"{LAYER}.mu"].fill_(math.nan), f"{LAYER}.mu is .nan.*a number is needed"),
        (lambda w: w[f"{LAYER}.eta"].fill_(math.inf), f"{LAYER}.eta is .inf.*finite number"),
    ],
)
def test_weights_that_do_not_fit_the_plan(saved, change, message):
    _, folder = saved
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(folder, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: c.pop("rsa"), ValueError, "has RSA heads, but holds no plan"),
        (
            lambda c: [c.pop(key) for key in ("rsa", "attn_implementation", "fusion_config")],
            ValueError,
            "in the checkpoint, but not in the plan",
        ),
        (lambda c: c["rsa"]["plan"].update(num_regular=2), ValueError, "eta has shape"),
        (lambda c: c["rsa"]["plan"].update(num_regular=9e9), TypeError, "num_regular=9000000000.0"),
        (lambda c: c["rsa"]["plan"].update(dilation=-1), ValueError, "dilation=-1"),
        (lambda c: c["rsa"]["plan"].update(depth=1), ValueError, "unknown RSA setting 'depth'"),
        (lambda c: c["rsa"]["plan"].update(num_regular=10**12), ValueError, "at most 4096 attention heads"),
        (lambda c: c["rsa"]["plan"].update(gate_init="__import__('os')"), TypeError, "a number is needed"),
        (lambda c: c["rsa"].update(format_version=2), ValueError, "format_version 2.*newer"),
        (lambda c: c["rsa"].pop("modules"), ValueError, "needed: format_version, modules, plan"),
        (
            lambda c: c["rsa"].update(modules=["encoder.layer.7.attention.self"]),
            ValueError,
            "7.attention.self, which this RobertaModel does not have",
        ),
        (lambda c: c["rsa"].update(modules=["__class__"]), ValueError, "no module name"),
        (lambda c: c["rsa"].update(modules=["../x"]), ValueError, "no module name"),
        (lambda c: c["rsa"].update(modules=["encoder[0]"]), ValueError, "no module name"),
        (lambda c: c["rsa"].update(modules=["nowhere"] * 2), ValueError, "more than once"),
        (lambda c: c["rsa"].update(modules=["nowhere"]), ValueError, "nowhere, which this"),
        (lambda c: c.update(rsa=[1]), TypeError, "config.rsa is a mapping"),
        (
            lambda c: c.update(num_hidden_layers=1),
            ValueError,
            "layer.1.attention.self, which this RobertaModel does not",
        ),
    ],
)
def test_plans_that_do_not_fit(saved, change, error, message):
    _, folder = saved
    edit_config(folder, change)
    with pytest.raises(error, match=message):
        AutoModel.from_pretrained(folder)


def test_a_plain_checkpoint_with_a_plan_is_refused(tmp_path, saved):
    model, _ = saved
    build("roberta").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="missing from the checkpoint.*load it plain and call patch_model"):
        AutoModel.from_pretrained(tmp_path / "plain", config=model.config)


def test_recurrence_is_not_saved_without_its_plan(tmp_path):
    model = trained(build_language_model("t5"))
    with pytest.raises(ValueError, match="config has no plan"):
        model.encoder.save_pretrained(tmp_path)
    config = copy.deepcopy(model.config)
    plain = build_language_model("t5")
    plain.config.rsa = config.rsa
    with pytest.raises(ValueError, match="model has no RSA heads"):
        plain.save_pretrained(tmp_path)


@pytest.mark.parametrize("change", ["dropped", "doubled", "turned round", "without heads"])
@torch.no_grad()
def test_layers_that_are_no_longer_those_of_the_plan(change, tmp_path):
    # Turned round, a copy would load with the dilations of other layers.
    plan = {"num_regular": 1, "num_dilated_regular": 1, "dilation": [[2], [5]], "gate_init": 0.5}
    model = trained(build_language_model("llama"), plan)
    layers = model.model.layers
    if change == "dropped":
        model.model.layers = layers[:1]
    elif change == "doubled":
        layers.append(copy.deepcopy(layers[1]))
        layers[2].self_attn.layer_idx = 2
    elif change == "turned round":
        model.model.layers = torch.nn.ModuleList([layers[1], layers[0]])
    else:
        del layers[1].self_attn.rsa
    model.config.num_hidden_layers = len(model.model.layers)
    model.config.layer_types = None
    with pytest.raises(ValueError, match="RSA heads of this LlamaForCausalLM are not those of its plan"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())

    # As the message says: what was trained is kept.
    ids = inputs("llama")["input_ids"]
    expected, state = model(ids, use_cache=False).logits, model.state_dict()
    dilation = {"dropped": [[2]], "doubled": [[2], [5], [5]], "turned round": [[5], [2]], "without heads": [[2]]}
    layers = [0] if change == "without heads" else None
    patch_model(unpatch_model(model), RSAConfig(**{**plan, "dilation": dilation[change], "layers": layers}))
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids, use_cache=False).logits, expected)


def test_wrapped_layers_are_those_of_the_plan(tmp_path):
    model = trained(build_language_model("llama"))
    expected = model.state_dict()
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in layers)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@torch.no_grad()
def test_shut_gate_survives(tmp_path):
    model = patch_model(build("gpt2"), RSAConfig(gate_init=-math.inf))
    model.save_pretrained(tmp_path)
    json.loads((tmp_path / "config.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.h[0].attn.rsa.rates()["gate"].item() == 0
    assert torch.equal(loaded(**(batch := inputs("gpt2")))[0], model(**batch)[0])


@torch.no_grad()
def test_plans_without_heads_of_a_kind(tmp_path):
    model, batch = trained(build("roberta"), {"num_regular": 2, "gate_init": 0.5}), inputs("roberta")
    assert not [name for name in model.state_dict() if name.endswith(("rsa.nu", "rsa.theta"))]
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(**batch)[0], model(**batch)[0])
    edit_weights(tmp_path, lambda w: w.update({f"{LAYER}.nu": torch.zeros(1)}))
    with pytest.raises(ValueError, match=f"not in the plan: {LAYER}.nu"):
        AutoModel.from_pretrained(tmp_path)


def test_a_plain_model_is_saved_as_ever(tmp_path):
    build("roberta").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert not {"rsa", "attn_implementation", "fusion_config"} & set(content)


@torch.no_grad()
def test_a_decoder_that_builds_its_own_base_from_the_config_comes_back(tmp_path):
    # Mllama's text decoder alone: its base is another PreTrainedModel, built from the same config.
    config = MllamaTextConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        cross_attention_layers=[],
        pad_token_id=0,
    )
    model = patch_model(MllamaForCausalLM(config), RSAConfig(gate_init=0.0)).eval()
    ids = torch.randint(3, 50, (1, 7))
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(MllamaForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, expected)
    unpatch_model(model)
    assert not torch.allclose(model(ids).logits, expected)


class InAFolder(PreTrainedModel):
    """A model of a user's own, with another one some levels down and no name for it."""

    config_class = GPT2Config
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.parts = torch.nn.ModuleDict({"text": AutoModel.from_config(config)})
        self.post_init()

    def forward(self, input_ids):
        return self.parts["text"](input_ids).last_hidden_state


@torch.no_grad()
def test_a_model_with_another_one_deeper_in_it_comes_back(tmp_path):
    model, ids = trained(InAFolder(CONFIGS["gpt2"]())), inputs("gpt2")["input_ids"]
    model.save_pretrained(tmp_path)
    assert torch.equal(InAFolder.from_pretrained(tmp_path)(ids), model(ids))


def test_heads_that_are_spread_over_processes_are_refused(tmp_path, monkeypatch):
    """Each process would take the first of its own heads for RSA heads."""
    patch_model(build("llama"), RSAConfig(**FULL_PLAN)).save_pretrained(tmp_path)
    plain = build("llama")
    monkeypatch.setattr(PreTrainedModel, "_tp_size", 2)  # as from_pretrained(tp_plan="auto") sets it in two processes
    with pytest.raises(NotImplementedError, match="tensor parallelism.*tp_plan"):
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="tensor parallelism.*tp_plan"):
        patch_model(plain, RSAConfig(**FULL_PLAN))
    assert not is_patched(plain)
