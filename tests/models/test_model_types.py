"""Our own models are found by their type, and are imported only where they are wanted."""

import pkgutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import rsa_hf.models
from rsa_hf.models import MODEL_TYPES

FRESH = """
import sys
import rsa_hf
from transformers import AutoConfig, AutoModelForCausalLM
loaded = [name for name in sys.modules if name.startswith("rsa_hf.models.")]
assert not loaded, loaded
assert "gpt2" in __import__("transformers").CONFIG_MAPPING
assert not [name for name in sys.modules if name.startswith("rsa_hf.models.")]
config = AutoConfig.for_model("transfo-xl", vocab_size=32, cutoffs=[], hidden_size=16, num_hidden_layers=1)
assert type(AutoModelForCausalLM.from_config(config)).__module__.startswith("rsa_hf.models.transformer_xl")
assert "rsa_hf.models.recurrent" not in sys.modules
"""


def test_a_folder_is_imported_when_an_auto_class_meets_its_type():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_type_has_a_config_and_a_model(model_type):
    config = AutoConfig.for_model(model_type)
    assert config.model_type == model_type
    assert type(config).__module__.startswith(f"rsa_hf.models.{MODEL_TYPES[model_type]}.")
    assert issubclass(AutoModel._model_mapping[type(config)], PreTrainedModel)


def test_no_folder_is_forgotten():
    folders = {module.name for module in pkgutil.iter_modules(rsa_hf.models.__path__) if module.ispkg}
    assert folders == set(MODEL_TYPES.values())


SMALL = {
    "block-recurrent": {},
    "recurrent": {},
    "sru_plus_plus": {},
    "temporal_latent_bottleneck": {},
    "transfo-xl": {"cutoffs": []},
}


@pytest.mark.parametrize("model_type", SMALL)
def test_label_smoothing_shifts_the_labels_of_a_language_model(model_type, tmp_path):
    config = AutoConfig.for_model(model_type, vocab_size=11, hidden_size=16, **SMALL[model_type])
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(11, (2, 9))
    batch = {"input_ids": ids, "labels": ids}
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=1e-9, use_cpu=True, report_to="none")
    smoothed = Trainer(model, arguments).compute_loss(model, dict(batch))
    torch.testing.assert_close(smoothed, model(**batch).loss)


def test_no_language_model_is_forgotten():
    configs = {model_type: type(AutoConfig.for_model(model_type)) for model_type in MODEL_TYPES}
    assert set(SMALL) == {name for name, config in configs.items() if config in AutoModelForCausalLM._model_mapping}


def test_a_type_of_nobody_is_still_refused():
    with pytest.raises(ValueError, match="Unrecognized model identifier: nothing-like-it"):
        AutoConfig.for_model("nothing-like-it")
