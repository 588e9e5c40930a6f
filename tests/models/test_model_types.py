"""Our own models are found by their type, and are imported only where they are wanted."""

import pkgutil
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoModel, PreTrainedModel

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


def test_a_type_of_nobody_is_still_refused():
    with pytest.raises(ValueError, match="Unrecognized model identifier: nothing-like-it"):
        AutoConfig.for_model("nothing-like-it")
