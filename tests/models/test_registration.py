"""The Auto classes and the Trainer find the package's models, each class by its type and its name."""

from importlib import import_module

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel, Trainer, TrainingArguments

from models import tiny
from rsa_hf.models import MODEL_TYPES, class_named
from rsa_hf.models.transformer_xl import TransformerXLForCausalLM


def classes():
    """Every model class of the package with its model type."""
    for model_type, folder in MODEL_TYPES.items():
        for found in vars(import_module(f"rsa_hf.models.{folder}")).values():
            if isinstance(found, type) and issubclass(found, PreTrainedModel):
                yield model_type, found


@pytest.mark.parametrize(("model_type", "model_class"), classes())
def test_every_class_is_loaded_as_itself(model_type, model_class, tmp_path):
    model = model_class(tiny.config(model_type))
    model.save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path)
    assert class_named(saved.architectures[0], saved.model_type) is model_class
    loaded = model_class.from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_the_class_names_of_transformers_4_are_known():
    assert class_named("TransfoXLLMHeadModel", "transfo-xl") is TransformerXLForCausalLM
    assert class_named("GPT2LMHeadModel", "gpt2") is class_named("Trainer", "transfo-xl") is None


@pytest.mark.parametrize("model_type", tiny.TINY)
def test_label_smoothing_shifts_the_labels_of_a_language_model(model_type, tmp_path):
    model, ids = tiny.build(model_type), tiny.text()
    batch = {"input_ids": ids, "labels": ids}
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=1e-9, use_cpu=True, report_to="none")
    smoothed = Trainer(model, arguments).compute_loss(model, dict(batch))
    torch.testing.assert_close(smoothed, model(**batch).loss)
