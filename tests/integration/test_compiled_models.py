"""Models and layers under torch.compile(fullgraph=True). test_decoding_strategies.py has compiled decoding."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from architectures import ADAPTED, build_adapted
from families import FULL_PLAN, build, inputs, patched, tokens
from rsa_hf import patch_model, unpatch_model

pytestmark = pytest.mark.usefixtures("fresh_compiler")
SLOW = [("gpt2", "eager"), ("llama", "sdpa"), *((name, None) for name in ADAPTED)]
CASES = [("gpt2", "sdpa"), ("llama", "eager"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_a_training_step_is_one_graph(name, attention):
    """Through the attention interface, and beside it (`attention` is None)."""
    model = patch_model(build_adapted(name) if attention is None else build(name, attention), FULL_PLAN)
    batch = inputs(name, length=20, padding=None if name == "xlnet_causal" else 7)

    def gradients(forward):
        model.zero_grad()
        forward(**batch)[0].square().mean().backward()
        # An unused pooler has no gradient, or, compiled with the rest, one of zeros.
        return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}

    expected = gradients(model)
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert sum(bool(value.any()) for value in expected.values()) > 10
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("part", ["", "self_attn"])
def test_layers_compiled_one_by_one_share_a_graph(part):
    model, batch, graphs = patched("llama"), inputs("llama") | {"use_cache": False}, CompileCounter()
    expected = model(**batch)[0]
    for layer in model.model.layers:
        layer.get_submodule(part).compile(fullgraph=True, backend=graphs)
    torch.testing.assert_close(model(**batch)[0], expected)
    assert graphs.frame_count == 1 < len(model.model.layers)


def test_checkpointed_layers_are_compiled_with_dynamic_lengths():
    model = patched("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for batch in (inputs("llama", length=length) | {"use_cache": False} for length in (9, 14)):
        torch.testing.assert_close(compiled(**batch)[0], model(**batch)[0])


@pytest.mark.slow  # exports a model
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_decoder_exported_with_a_static_cache_generates_as_it_did(name):
    model, ids = patched(name), tokens(1, 20)
    cache = {"batch_size": 1, "max_cache_len": 32}
    model.generation_config = GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=32, cache_config=cache
    )
    exportable = TorchExportableModuleForDecoderOnlyLM(model, **cache)
    inputs = {"input_ids": ids[:, :6], "cache_position": torch.arange(6)}
    lengths = {"input_ids": {1: torch.export.Dim.DYNAMIC}, "cache_position": {0: torch.export.Dim.DYNAMIC}}
    step = exportable.export(**inputs, dynamic_shapes=lengths).module()
    places = torch.arange(20).split([9, 6, 5])
    found = torch.cat([step(input_ids=ids[:, place], cache_position=place) for place in places], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-5, atol=1e-5)
        assert (unpatch_model(model)(ids).logits - found).abs().max() > 1e-2  # the control
