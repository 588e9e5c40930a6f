"""Training steps, and decoding with a static cache, under torch.compile(fullgraph=True)."""

import pytest
import torch
from transformers import StaticCache

from architectures import ADAPTED, build_adapted
from families import FULL_PLAN, VOCAB, build_language_model
from rsa_hf import patch_model
from texts import padded, uncached

LENGTH = 40


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gpt_neo" else pytest.mark.slow) for n in ADAPTED])
def test_a_training_step_beside_the_attention_interface_is_one_graph(name):
    model = patch_model(build_adapted(name), FULL_PLAN)
    inputs = {"input_ids": torch.randint(3, VOCAB, (2, 20))}
    if name != "xlnet_causal":
        inputs["attention_mask"] = torch.ones(2, 20).long()
        inputs["attention_mask"][0, :7] = 0

    def gradients(forward):
        model.zero_grad()
        forward(**inputs)[0].square().mean().backward()
        # An unused pooler has no gradient, or, compiled with the rest, one of zeros.
        return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}

    expected = gradients(model)
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert sum(bool(value.any()) for value in expected.values()) > 10
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def loss_and_gradients(model, forward, inputs):
    model.zero_grad()
    # The models' own loss logs, which breaks the graph of plain models too.
    logits = forward(**inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_training_step_is_one_graph(family, attention, padding):
    model = patch_model(build_language_model(family, attention), FULL_PLAN).eval()
    inputs = {"input_ids": torch.randint(3, VOCAB, (2, LENGTH)), "attention_mask": torch.ones(2, LENGTH).long()}
    if padding:
        inputs["attention_mask"][0, :7] = 0
    expected = loss_and_gradients(model, model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = loss_and_gradients(model, compiled, inputs)
    assert len(found) == len(expected) > 10
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@torch.no_grad()
def test_decoding_with_a_static_cache_is_one_graph(family):
    model = patch_model(build_language_model(family), FULL_PLAN).eval()
    batch = padded(torch.randint(3, VOCAB, (2, LENGTH)), (5,))
    ids, mask, positions = batch.values()
    expected = uncached(model, batch)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 9)
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model.forward, fullgraph=True, backend=count)
    start = LENGTH - 12
    prefill = {"attention_mask": mask[:, :start], "position_ids": positions[:, :start], "past_key_values": cache}
    logits = [model(input_ids=ids[:, :start], **prefill).logits]
    for t in range(start, LENGTH):
        seen = torch.nn.functional.pad(mask[:, : t + 1], (0, LENGTH + 9 - t - 1))
        step = {"attention_mask": seen, "position_ids": positions[:, t : t + 1], "past_key_values": cache}
        logits.append(compiled(input_ids=ids[:, t : t + 1], **step).logits)
    real = mask.bool()
    assert float((torch.cat(logits, 1)[real] - expected[real]).abs().max()) <= 1e-5
    assert len(graphs) == 1, "every step uses the same graph"
