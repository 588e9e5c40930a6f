"""The Auto classes find our own models by their type, and the Trainer by their name."""

import pkgutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import rsa_hf.models
from models import tiny
from rsa_hf.models import MODEL_TYPES, register_all


def test_importing_the_package_registers_all():
    types = " ".join(MODEL_TYPES)
    code = f"import rsa_hf, transformers; [transformers.AutoConfig.for_model(name) for name in '{types}'.split()]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_registering_again_changes_nothing():
    before = {name: type(AutoConfig.for_model(name)) for name in MODEL_TYPES}
    register_all()
    assert {name: type(AutoConfig.for_model(name)) for name in MODEL_TYPES} == before


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_type_has_a_config_and_a_model(model_type):
    config = AutoConfig.for_model(model_type)
    assert config.model_type == model_type
    assert type(config).__module__.startswith(f"rsa_hf.models.{MODEL_TYPES[model_type]}.")
    assert issubclass(AutoModel._model_mapping[type(config)], PreTrainedModel)


def test_no_folder_is_forgotten():
    folders = {module.name for module in pkgutil.iter_modules(rsa_hf.models.__path__) if module.ispkg}
    assert folders == set(MODEL_TYPES.values())


@pytest.mark.parametrize("model_type", tiny.TINY)
def test_label_smoothing_shifts_the_labels_of_a_language_model(model_type, tmp_path):
    model, ids = tiny.build(model_type), tiny.text()
    batch = {"input_ids": ids, "labels": ids}
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=1e-9, use_cpu=True, report_to="none")
    smoothed = Trainer(model, arguments).compute_loss(model, dict(batch))
    torch.testing.assert_close(smoothed, model(**batch).loss)


def test_no_language_model_is_forgotten():
    configs = {model_type: type(AutoConfig.for_model(model_type)) for model_type in MODEL_TYPES}
    assert set(tiny.TINY) == {
        name for name, config in configs.items() if config in AutoModelForCausalLM._model_mapping
    }


def test_a_type_of_nobody_is_still_refused():
    with pytest.raises(ValueError, match="Unrecognized model identifier: nothing-like-it"):
        AutoConfig.for_model("nothing-like-it")
