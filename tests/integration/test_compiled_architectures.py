"""Models that do not use the attention interface, under torch.compile(fullgraph=True)."""

import pytest
import torch
from test_compiled_models import fresh_compiler  # noqa: F401  (a fixture)

from architectures import ADAPTED, build_adapted
from families import FULL_PLAN, VOCAB
from rsa_hf import RSAConfig, patch_model


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gpt_neo" else pytest.mark.slow) for n in ADAPTED])
def test_a_training_step_is_one_graph(name):
    model = patch_model(build_adapted(name), RSAConfig(**FULL_PLAN))
    inputs = {"input_ids": torch.randint(3, VOCAB, (2, 20))}
    if name != "xlnet_causal":
        inputs["attention_mask"] = torch.ones(2, 20).long()
        inputs["attention_mask"][0, :7] = 0

    def gradients(forward):
        model.zero_grad()
        forward(**inputs)[0].square().mean().backward()
        # A pooler that the loss does not read has no gradient, or, compiled with the rest, one of zeros.
        return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}

    expected = gradients(model)
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert sum(bool(value.any()) for value in expected.values()) > 10
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
