"""Commands load a model of ours with the class it was saved with: none loses its head."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rsa_hf import RSAConfig, cli, is_patched, patch_model
from rsa_hf.cli.common import load_checkpoint
from rsa_hf.models import MODEL_TYPES
from rsa_hf.models.transformer_xl import TransformerXLForCausalLM

GOLDEN = Path(__file__).parent / "golden"
SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}
TINY = {
    "block-recurrent": {**HEADS, "head_dim": 8, "d_inner": 48, "window_size": 8, "recurrent_layers": [-1]},
    "recurrent": {},
    "recurrent_encoder_decoder": {},
    "sru_plus_plus": {**HEADS, "projection_size": 32, "mem_len": 8},
    "temporal_latent_bottleneck": {**HEADS, "intermediate_size": 48, "chunk_size": 4, "num_states": 4},
    "transfo-xl": {**HEADS, "head_dim": 8, "d_inner": 48, "cutoffs": [], "div_val": 1, "mem_len": 8, "clamp_len": 32},
}
WITH_ATTENTION = [name for name, settings in TINY.items() if settings]


def classes():
    """Every class of ours that can be saved, by its model type."""
    for model_type, folder in MODEL_TYPES.items():
        module = import_module(f"rsa_hf.models.{folder}")
        for name in module.__all__:
            if issubclass(getattr(module, name), PreTrainedModel):
                yield model_type, name


def build(model_type, name, **settings):
    module = import_module(f"rsa_hf.models.{MODEL_TYPES[model_type]}")
    return getattr(module, name)(AutoConfig.for_model(model_type, **SMALL, **TINY[model_type], **settings))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process; returns its exit code and what it printed."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["rsa-hf", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("model_type", "name"), classes())
def test_each_class_is_loaded_as_itself(model_type, name, tmp_path):
    model = build(model_type, name)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(str(tmp_path))
    assert type(loaded) is type(model)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


@pytest.mark.parametrize("model_type", WITH_ATTENTION)
def test_patch_keeps_the_head(model_type, run, tmp_path):
    name = next(name for of, name in classes() if of == model_type and name.endswith("ForCausalLM"))
    build(model_type, name).save_pretrained(tmp_path / "base")
    code, _, err = run("patch", tmp_path / "base", tmp_path / "out", "--plan", "{num_regular: 2}")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [name]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in load_file(tmp_path / "base" / "model.safetensors").items():
        assert torch.equal(weights[key], value), key
    assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))


def test_doctor_tries_the_whole_model(run, tmp_path):
    # Its weights are so large that RSA changes more than a trace.
    model = build("transfo-xl", "TransformerXLForCausalLM", init_std=0.2)
    patch_model(model, RSAConfig(num_regular=2)).save_pretrained(tmp_path)
    code, out, _ = run("doctor", "--model", tmp_path)
    assert code == 0, out
    assert f"{tmp_path}: TransformerXLForCausalLM has RSA heads" in out


def test_a_language_model_of_transformers_4():
    """Its class has another name there."""
    assert type(load_checkpoint(str(GOLDEN / "plain"))) is TransformerXLForCausalLM


@pytest.mark.parametrize(
    "name", ["NobodysModel", "Trainer", "TransformerXLForCausalLM", "PreTrainedModel", "", None, {"a": 1}]
)
def test_a_class_that_is_not_there_is_refused(name, run, tmp_path):
    """A model of another class would be saved without the parts that it does not have."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))
    for command in (["patch", tmp_path / "base", tmp_path / "out"], ["doctor", "--model", tmp_path / "base"]):
        code, _, err = run(*command)
        assert code == 2
        # What is no text an older transformers refuses before we do.
        named = f"config.json names the class {name!r}, which" in err
        assert named or (not isinstance(name, str) and "'architectures'" in err)
        assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_no_class_is_the_base_model(tmp_path):
    model = build("transfo-xl", "TransformerXLModel")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["architectures"]
    path.write_text(json.dumps(content))
    assert type(load_checkpoint(str(tmp_path))) is type(model)
