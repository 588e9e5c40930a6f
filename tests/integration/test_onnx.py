"""Exported models and steps, and their ONNX, give PyTorch's outputs, also for other batches, lengths and paddings."""

import copy
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from families import FULL_PLAN, VOCAB, build
from rsa_hf import patch_model, unpatch_model
from texts import padded


@pytest.fixture(scope="module")
def onnxruntime():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"ONNX export needs {package}: pip install 'rsa_hf[onnx]'")


@pytest.fixture(scope="module")
def exported(onnxruntime):
    """A patched RoBERTa and its export, which was made with a batch of 2 and a length of 11."""
    torch.manual_seed(0)
    model = patch_model(build("roberta"), FULL_PLAN)
    ids = torch.randint(3, VOCAB, (2, 11))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=100)}
    shapes = {"dynamic_shapes": dict.fromkeys(batch, dynamic), "input_names": list(batch)}
    return model, torch.onnx.export(model, (), kwargs=batch, **shapes, dynamo=True)


@pytest.mark.slow  # exports a model
@pytest.mark.parametrize(("batch", "length", "padding"), [(2, 11, 0), (1, 7, 0), (3, 40, 5), (5, 93, 12)])
def test_an_exported_roberta_gives_the_same_outputs(exported, batch, length, padding):
    model, program = exported
    inputs = padded(torch.randint(3, VOCAB, (batch, length)), (padding,), "right")
    del inputs["position_ids"]
    found, real = program(**inputs)[0], inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, without = (each(**inputs)[0] for each in (model, unpatch_model(copy.deepcopy(model))))
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)
    assert (found - without)[real].abs().mean() > 1e-2  # the control: the recurrence matters


class Step(torch.nn.Module):
    """A decoder with its cache as inputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, keys, values):
        cache = DynamicCache()
        for i, tensors in enumerate(zip(keys, values, strict=True)):
            cache.update(*tensors, i)
        return self.model(ids, attention_mask=mask, past_key_values=cache).last_hidden_state


@pytest.mark.parametrize("onnx", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_step_of_decoding_gives_the_same_outputs(onnx, request):
    model = patch_model(build("llama"), FULL_PLAN).eval()

    def inputs(batch, cached):
        cache, ids = DynamicCache(), torch.randint(3, VOCAB, (batch, cached + 1))
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        with torch.no_grad():
            model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            expected = model(ids, attention_mask=mask).last_hidden_state[:, -1:]
        keys, values = ([getattr(layer, name) for layer in cache.layers] for name in ("keys", "values"))
        return (ids[:, -1:], mask, keys, values), expected

    dynamic, n = torch.export.Dim.DYNAMIC, model.config.num_hidden_layers
    of_cache = [{0: dynamic, 2: dynamic}] * n
    shapes = ({0: dynamic}, {0: dynamic, 1: dynamic}, of_cache, of_cache)
    program = torch.export.export(Step(model), inputs(2, 7)[0], dynamic_shapes=shapes)
    if onnx:
        request.getfixturevalue("onnxruntime")
    step = torch.onnx.export(program, (), dynamo=True) if onnx else program.module()
    for sizes in ((2, 7), (3, 12)):
        given, expected = inputs(*sizes)
        found = step(*given)
        torch.testing.assert_close(found[0] if onnx else found, expected, atol=1e-4, rtol=1e-4)


class LastHiddenState(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).last_hidden_state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("record", [torch.jit.trace, partial(torch.onnx.export, dynamo=False)])
def test_tracing_is_an_error_that_names_the_alternative(record, tmp_path):
    model = build("roberta")
    file = () if record is torch.jit.trace else (tmp_path / "model.onnx",)
    arguments = (LastHiddenState(model), (torch.randint(3, VOCAB, (2, 11)),), *file)
    record(*arguments)
    patch_model(model)
    with pytest.raises(NotImplementedError, match=r"Use torch.export, or torch.onnx.export\(..., dynamo=True\)"):
        record(*arguments)
