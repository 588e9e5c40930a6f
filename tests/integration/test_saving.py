"""Checkpoints load bit for bit, and one that does not fit is an error that names the reason."""

import copy
import json
import math
import textwrap

import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from families import CONFIGS, FULL_PLAN, build, build_language_model, inputs, move_rates, tiny_config
from file_edits import edit_json, edit_tensors
from launching import run_python
from rsa_hf import RSAConfig, patch_model, unpatch_model
from small_runs import assert_same_weights


def trained(model, plan=FULL_PLAN):
    """A patched model whose gates and rates are not at their initial values."""
    return move_rates(patch_model(model, RSAConfig(**plan)))


@pytest.fixture
def saved(tmp_path):
    trained(build("roberta")).save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "half"), [("t5", transformers.T5EncoderModel), ("bart", transformers.BartForCausalLM)]
)
def test_a_half_of_an_encoder_decoder_loads_alone(family, half, tmp_path):
    model = trained(build_language_model(family))
    embedded = torch.randn(2, 9, model.config.d_model)  # transformers leaves BART's embeddings out
    model.save_pretrained(tmp_path)
    alone = half.from_pretrained(tmp_path)
    stacks = (each.get_decoder() if family == "bart" else each.get_encoder() for each in (model, alone))
    assert torch.equal(*(stack(inputs_embeds=embedded)[0] for stack in stacks))
    alone.save_pretrained(tmp_path / "half")
    assert_same_weights(half.from_pretrained(tmp_path / "half").state_dict(), alone.state_dict())


@pytest.mark.parametrize("initialise", [False, True])
def test_a_model_built_on_the_meta_device_starts_where_the_plan_says(initialise, saved):
    config = AutoConfig.from_pretrained(saved)
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
    "AutoModel.from_config(AutoConfig.from_pretrained(path))",
    "AutoModel.from_pretrained(path, attn_implementation='sdpa')",
    "pipeline('feature-extraction', model=path)",
    "CLIPTextModel.from_pretrained(path + '/clip', attn_implementation='sdpa')",  # reads a part of config.json
]


def test_without_rsa_hf_the_checkpoint_does_not_load(saved):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=sizes, vision_config=sizes))
    patch_model(clip.text_model, RSAConfig())
    clip.save_pretrained(saved / "clip")
    # One process for all of them, since importing transformers takes most of the time.
    code = f"""
        import json, sys
        from transformers import AutoConfig, AutoModel, CLIPTextModel, pipeline
        assert "rsa_hf" not in sys.modules
        path, messages = {str(saved)!r}, []
        for way in {WAYS_TO_LOAD!r}:
            try:
                eval(way)
                messages.append("loaded")
            except Exception as error:
                messages.append(str(error))
        print(json.dumps(messages))
    """
    done = run_python("-c", textwrap.dedent(code), code=0)
    for way, message in zip(WAYS_TO_LOAD, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert "pip install rsa_hf, then import rsa_hf" in message, way


LAYER = "encoder.layer.1.attention.self.rsa"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(f"{LAYER}.mu"), f"missing from the checkpoint: {LAYER}.mu"),
        (lambda w: w.update({f"{LAYER}.mu": torch.zeros(3)}), r"rsa.mu has shape \(3,\).*\(1,\)"),
        (lambda w: w.update({"pooler.rsa.eta": torch.zeros(2)}), "but not in the plan: pooler.rsa.eta"),
    ],
)
def test_weights_that_do_not_fit_the_plan_are_an_error(saved, change, message):
    edit_tensors(saved / "model.safetensors", change)
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=message):
            AutoModel.from_pretrained(saved, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("rsa"), "in the checkpoint, but not in the plan"),
        (lambda c: c["rsa"]["plan"].update(num_regular=2), "eta has shape"),
        (lambda c: c["rsa"]["plan"].update(depth=1), "unknown RSA setting 'depth'"),
        (lambda c: c["rsa"].update(format_version=4), "format_version 4.*newer"),
        (lambda c: c["rsa"].pop("modules"), "needed: format_version, modules, plan"),
        (lambda c: c["rsa"].update(modules=["encoder.layer.7"]), "encoder.layer.7, which this Roberta"),
        (lambda c: c["rsa"].update(modules=["__class__"]), "module name"),
        (lambda c: c.update(num_hidden_layers=1), "layer.1.attention.self, which this RobertaModel does not"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error(saved, change, message):
    edit_json(saved / "config.json", change)
    with pytest.raises((ValueError, TypeError), match=message):
        AutoModel.from_pretrained(saved)


def test_a_plain_checkpoint_with_a_plan_is_refused(tmp_path, saved):
    build("roberta").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="missing from the checkpoint.*load it plain and call patch_model"):
        AutoModel.from_pretrained(tmp_path / "plain", config=AutoConfig.from_pretrained(saved))


def test_heads_are_not_saved_without_their_plan_nor_a_plan_without_its_heads(tmp_path):
    model = trained(build_language_model("t5"))
    with pytest.raises(ValueError, match="config has no plan"):
        model.encoder.save_pretrained(tmp_path)
    plain = build_language_model("t5")
    plain.config.rsa = copy.deepcopy(model.config.rsa)
    with pytest.raises(ValueError, match="model has no RSA heads"):
        plain.save_pretrained(tmp_path)
    assert unpatch_model(plain).config.rsa  # it may be that of a patched model, which shares the config


@pytest.mark.parametrize("change", ["dropped", "duplicated", "swapped", "without heads"])
@torch.no_grad()
def test_changed_layers_are_saved_only_with_a_new_plan(change, tmp_path):
    # Swapped layers would load with each other's dilations.
    def plan(*dilations):
        regular = {"head": 0, "kind": "regular", "decay": 0.5, "gate": 0.5}
        return {"heads": [{"layer": i, "dilation": d, **regular} for i, d in enumerate(dilations)]}

    model = trained(build_language_model("llama"), plan(2, 5))
    layers = model.model.layers
    if change == "dropped":
        model.model.layers = layers[:1]
    elif change == "duplicated":
        layers.append(copy.deepcopy(layers[1]))
        layers[2].self_attn.layer_idx = 2
    elif change == "swapped":
        model.model.layers = torch.nn.ModuleList([layers[1], layers[0]])
    else:
        del layers[1].self_attn.rsa
    model.config.num_hidden_layers = len(model.model.layers)
    model.config.layer_types = None
    with pytest.raises(ValueError, match="not those of its plan.*the layers' new numbers"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())

    # Doing what the message says keeps the trained values.
    ids = inputs("llama")["input_ids"]
    expected, state = model(ids, use_cache=False).logits, model.state_dict()
    dilations = {"dropped": [2], "duplicated": [2, 5, 5], "swapped": [5, 2], "without heads": [2]}
    patch_model(unpatch_model(model), plan(*dilations[change]))
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("change", [lambda layers: layers[:1], lambda layers: torch.nn.ModuleList(layers[::-1])])
def test_changed_layers_of_a_part_are_not_saved(change, tmp_path):
    heads = [{"layer": i, "head": i, "kind": "regular", "decay": 0.5, "gate": 0.5} for i in range(2)]
    decoder = transformers.BertLMHeadModel(tiny_config("bert", is_decoder=True, add_cross_attention=True))
    model = transformers.EncoderDecoderModel(encoder=trained(build("bert"), {"heads": heads}), decoder=decoder)
    model.save_pretrained(tmp_path / "before")
    model.encoder.encoder.layer = change(model.encoder.encoder.layer)
    model.config.encoder.num_hidden_layers = len(model.encoder.encoder.layer)
    with pytest.raises(ValueError, match="not those of its plan"):
        model.save_pretrained(tmp_path / "after")


@torch.no_grad()
def test_a_part_of_a_part_loads_in_half_precision_with_its_rates_unrounded(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 99, **sizes}
    images = {"model_type": "siglip_vision_model", "image_size": 14, "patch_size": 14, **sizes}
    inner = transformers.PaliGemmaConfig(text_config=text, vision_config=images, image_token_index=98)
    model = transformers.ColPaliForRetrieval(transformers.ColPaliConfig(vlm_config=inner))
    trained(model.get_decoder(), {"num_regular": 1, "num_free_lags": 2})
    model.save_pretrained(tmp_path)
    loaded = transformers.ColPaliForRetrieval.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    rates = {name: value for name, value in model.state_dict().items() if ".rsa." in name}
    assert len(rates) == 3 and all(torch.equal(loaded[name], value) for name, value in rates.items())


@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_wrapped_layers_are_saved_under_their_own_names(is_wrapped_first, tmp_path):
    model = build_language_model("llama")
    if not is_wrapped_first:
        trained(model)
    model.model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)
    if is_wrapped_first:
        trained(model)
    expected = model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@torch.no_grad()
def test_a_shut_gate_is_saved_as_valid_json(tmp_path):
    model = patch_model(build("gpt2"), RSAConfig(gate_init=-math.inf))
    model.save_pretrained(tmp_path)
    json.loads((tmp_path / "config.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.h[0].attn.rsa.rates()["gate"].item() == 0
    assert torch.equal(loaded(**(batch := inputs("gpt2")))[0], model(**batch)[0])


class WithInnerModel(PreTrainedModel):
    """A user's model with another model some levels down, and without a `base_model_prefix`."""

    config_class = transformers.GPT2Config
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.parts = torch.nn.ModuleDict({"text": AutoModel.from_config(config)})
        self.post_init()

    def forward(self, input_ids):
        return self.parts["text"](input_ids).last_hidden_state


@torch.no_grad()
def test_a_model_around_another_one_loads_bit_for_bit(tmp_path):
    model, ids = trained(WithInnerModel(CONFIGS["gpt2"]())), inputs("gpt2")["input_ids"]
    model.save_pretrained(tmp_path)
    assert torch.equal(WithInnerModel.from_pretrained(tmp_path)(ids), model(ids))
