"""Calibration inside contexts of PyTorch gives the plan that it gives outside, to the bit."""

import copy
import math
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from families import CONFIGS, VOCAB, build_language_model, widen
from model_state import assert_same_state, state_of
from rsa_hf import calibrate, patch_model
from rsa_hf.calibration import procedure, run_calibration


@contextmanager
def set_globally(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "device": lambda: torch.device("meta"),
    "default device": lambda: set_globally(torch.set_default_device, "meta", None),
    "default dtype bfloat16": lambda: set_globally(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default dtype float64": lambda: set_globally(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: set_globally(torch.use_deterministic_algorithms, True, False),
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
        modes = modes_now()
        found = run_calibration(model, (dict(batch) for batch in rows), **SETTINGS).to_dict()
        assert modes_now() == modes
    assert found == expected
    assert_same_state(model, before)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained


def modes_now():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
    )


@pytest.mark.parametrize("context", sorted(set(CONTEXTS) - {"deterministic", "default dtype float64"}))
def test_without_the_usual_modes_a_context_is_seen(context, monkeypatch):
    model = MODELS["new head"]()
    rows = rows_for(model)
    expected = run_calibration(model, rows, **SETTINGS).to_dict()
    monkeypatch.setattr(procedure, "_usual_modes", lambda model: nullcontext())
    found = None
    with CONTEXTS[context](), suppress(RuntimeError, TypeError, ValueError):
        found = run_calibration(model, rows, **SETTINGS).to_dict()
    assert found != expected


def test_an_error_leaves_the_context_as_it_was():
    model = MODELS["llama"]()
    rows = [{"input_ids": batch["input_ids"]} for batch in rows_for(model)]
    for context in CONTEXTS.values():
        with context():
            modes = modes_now()
            with pytest.raises(ValueError, match="gives no loss"):
                calibrate(model, rows, progress=False)
            assert modes_now() == modes


@pytest.mark.parametrize("inside", [True, False])
def test_rows_that_were_made_in_inference_mode(outside, inside):
    model, rows, expected = outside
    with torch.inference_mode():
        made = [{name: tensor.clone() for name, tensor in batch.items()} for batch in rows]
    assert made[0]["input_ids"].is_inference()
    with torch.inference_mode(inside):
        assert run_calibration(model, made, **SETTINGS).to_dict() == expected


def test_embeddings_and_biases_that_were_made_in_inference_mode():
    """Rows of floating-point numbers, and a tensor that has no row for each row of the batch."""
    model = language_model("gpt2")
    rows = [
        {"inputs_embeds": model.transformer.wte(batch["input_ids"]).detach(), **batch} for batch in rows_for(model)
    ]
    mask = torch.zeros(1, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    rows = [
        {"inputs_embeds": row["inputs_embeds"], "labels": row["labels"], "attention_mask": mask.expand(4, 1, 12, 12)}
        for row in rows
    ]
    expected = run_calibration(model, rows, **SETTINGS).to_dict()
    with torch.inference_mode():
        made = [{name: tensor.clone() for name, tensor in batch.items()} for batch in rows]
        assert run_calibration(model, made, **SETTINGS).to_dict() == expected


def test_weights_that_were_made_in_inference_mode_are_an_error():
    with torch.inference_mode():
        model = MODELS["llama"]()
    rows = rows_for(model)
    before = state_of(model)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM were made in torch.inference_mode.*copy.deepcopy, outside"
    ):
        calibrate(model, rows, progress=False)
    assert_same_state(model, before)
    expected = run_calibration(MODELS["llama"](), rows, **SETTINGS).to_dict()
    assert run_calibration(copy.deepcopy(model), rows, **SETTINGS).to_dict() == expected


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
    for context in (nullcontext, torch.inference_mode):
        with context():
            assert run_calibration(model, rows, **SETTINGS).to_dict() == expected
        for name, parameter in model.named_parameters():
            assert parameter.grad is gradients[name], name
            assert values[name] is None or torch.equal(parameter.grad, values[name]), name
        assert {name: module.training for name, module in model.named_modules()} == training


def test_the_plan_of_a_context_can_be_trained():
    """What calibration leaves behind holds no tensor of the context."""
    model = widen(MODELS["llama"]())
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(procedure, "CERTAIN", -math.inf)
        plan = calibrate(model, rows_for(model), **SETTINGS)
    patch_model(model, plan)
    model(**rows_for(model)[0]).loss.backward()
    gradients = [parameter.grad for name, parameter in model.named_parameters() if ".rsa." in name]
    assert gradients
    assert all(bool(torch.isfinite(grad).all()) for grad in gradients)
