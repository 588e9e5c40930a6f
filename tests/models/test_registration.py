"""The Auto classes, the Trainer and the commands find the package's models, each class by its type and its name."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainingArguments

from models import tiny
from rsa_hf import is_patched
from rsa_hf.cli.common import load_checkpoint
from rsa_hf.models import MODEL_TYPES, register_all
from rsa_hf.models.transformer_xl import TransformerXLForCausalLM

GOLDEN = Path(__file__).parent / "golden"


def classes():
    """Every model class of the package with its model type."""
    for model_type, folder in MODEL_TYPES.items():
        for found in vars(import_module(f"rsa_hf.models.{folder}")).values():
            if isinstance(found, type) and issubclass(found, PreTrainedModel):
                yield model_type, found


def test_registering_again_changes_nothing():
    before = {name: type(tiny.config(name)) for name in MODEL_TYPES}
    register_all()
    assert {name: type(tiny.config(name)) for name in MODEL_TYPES} == before


@pytest.mark.parametrize(("model_type", "model_class"), classes())
def test_every_class_is_loaded_as_itself(model_type, model_class, tmp_path):
    model = model_class(tiny.config(model_type))
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(str(tmp_path))
    assert type(loaded) is model_class
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


@pytest.mark.parametrize("model_type", tiny.TINY)
def test_label_smoothing_shifts_the_labels_of_a_language_model(model_type, tmp_path):
    model, ids = tiny.build(model_type), tiny.text()
    batch = {"input_ids": ids, "labels": ids}
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=1e-9, use_cpu=True, report_to="none")
    smoothed = Trainer(model, arguments).compute_loss(model, dict(batch))
    torch.testing.assert_close(smoothed, model(**batch).loss)


@pytest.mark.parametrize("model_type", tiny.WITH_ATTENTION)
def test_the_patch_command_keeps_the_head(model_type, run_rsa_hf, tmp_path):
    model = tiny.build(model_type)
    model.save_pretrained(tmp_path / "base")
    code, _, err = run_rsa_hf("patch", tmp_path / "base", tmp_path / "out", "--plan", "{num_regular: 2}")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [type(model).__name__]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in load_file(tmp_path / "base" / "model.safetensors").items():
        assert torch.equal(weights[key], value), key
    assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))


def test_a_language_model_of_transformers_4_is_loaded_by_its_old_class_name():
    assert type(load_checkpoint(str(GOLDEN / "plain"))) is TransformerXLForCausalLM


@pytest.mark.parametrize("name", ["NobodysModel", "Trainer", "TransformerXLForCausalLM", "PreTrainedModel", {"a": 1}])
def test_a_class_that_does_not_fit_is_refused(name, run_rsa_hf, tmp_path):
    """Loaded as another class, the model would lose the weights that this class lacks."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))
    code, _, err = run_rsa_hf("patch", tmp_path / "base", tmp_path / "out")
    assert code == 2
    # An older transformers refuses a name that is no string itself.
    assert f"config.json names the class {name!r}, which" in err or (
        isinstance(name, dict) and "'architectures'" in err
    )
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_config_without_a_class_is_loaded_as_the_base_model(tmp_path):
    model = tiny.build("transfo-xl").transformer
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["architectures"]
    path.write_text(json.dumps(content))
    assert type(load_checkpoint(str(tmp_path))) is type(model)
