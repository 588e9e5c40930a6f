"""The Auto classes and the Trainer find the package's models, each class by its type and its name."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from models import tiny
from rsa_hf.models import class_named
from rsa_hf.models.transformer_xl import TransformerXLForCausalLM


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
