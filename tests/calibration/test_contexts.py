"""Calibration inside contexts of PyTorch gives the plan that it gives outside, to the bit."""

import math
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from families import CONFIGS, VOCAB, build_language_model
from model_state import assert_same_state, state_of
from rsa_hf.calibration import procedure, run_calibration


@contextmanager
def set_dtype(dtype):
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "default dtype": lambda: set_dtype(torch.bfloat16),
}
SETTINGS = {"false_discoveries": 1.0, "gate_passes": 1, "head_steps": 2, "progress": False}


def language_model(family):
    torch.manual_seed(0)
    return build_language_model(family)


def classifier():
    """One with a new head, which calibration trains first."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(CONFIGS["bert"](), attn_implementation="eager").train()


def rows_for(model):
    ids = torch.randint(3, VOCAB, (3, 4, 12), generator=torch.Generator().manual_seed(0))
    labels = ids[:, :, 0] % 2 if "Classification" in type(model).__name__ else ids
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


MODELS = {"llama": lambda: language_model("llama"), "new head": classifier}


@pytest.fixture(scope="module", params=MODELS)
def outside(request):
    """A model, rows, and what calibration finds outside of all contexts; the plan always names heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procedure, "CERTAIN", -math.inf)
        model = MODELS[request.param]()
        rows = rows_for(model)
        model(**rows[0])  # which writes `problem_type` into the config of a classifier
        found = run_calibration(model, rows, **SETTINGS)
        assert found.heads
        assert (found.head_steps > 0) is (request.param == "new head")
        yield model, rows, found.to_dict()


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_context_changes_nothing(outside, context):
    model, rows, expected = outside
    before = state_of(model)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with CONTEXTS[context]():
        found = run_calibration(model, (dict(batch) for batch in rows), **SETTINGS).to_dict()
    assert found == expected
    assert_same_state(model, before)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained


def test_rows_that_were_made_in_inference_mode(outside):
    model, rows, expected = outside
    with torch.inference_mode():
        made = [{name: tensor.clone() for name, tensor in batch.items()} for batch in rows]
        assert run_calibration(model, made, **SETTINGS).to_dict() == expected


def test_gradients_and_modes_of_the_model_are_left_alone():
    """Gradients that the head has already are neither taken for its first step nor lost."""
    model = MODELS["new head"]()
    rows = rows_for(model)
    model(**rows[0])
    expected = run_calibration(model, rows, **SETTINGS).to_dict()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].eval()
    model(**rows[0]).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
    training = {name: module.training for name, module in model.named_modules()}
    assert run_calibration(model, rows, **SETTINGS).to_dict() == expected
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name], name
        assert values[name] is None or torch.equal(parameter.grad, values[name]), name
    assert {name: module.training for name, module in model.named_modules()} == training
