"""Training steps under torch.compile(fullgraph=True). test_decoding_strategies.py has compiled decoding."""

import pytest
import torch

from architectures import ADAPTED, build_adapted
from families import FULL_PLAN, build, inputs
from rsa_hf import patch_model

pytestmark = pytest.mark.usefixtures("fresh_compiler")
CASES = [("gpt2", "sdpa"), ("llama", "eager")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", "eager"), ("llama", "sdpa"))]
CASES += [pytest.param(n, None, marks=[] if n == "gpt_neo" else pytest.mark.slow) for n in ADAPTED]


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
