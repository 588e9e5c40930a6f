"""From the parameters of a layer to its output, and back to their gradients, on every backend, against dense P.

reliability/test_numbers_models.py has shut gates.
"""

from dataclasses import replace

import pytest
import torch

from ops.mixed_product import device
from references import equation_4, relative_error
from rsa_hf import RSAConfig, RSAHeads
from rsa_hf.ops.mask import AttentionMask

H, D = 8, 5
PAIRS = RSAConfig(num_regular=1, num_cyclical_pairs=2, num_dilated_cyclical_pairs=1, dilation=[2, 3])
UNTIED = [replace(head, pair=None) for head in PAIRS.counted_heads(0, H)]
# Each with its number of value heads.
CONFIGS = {
    "pairs and a gate": (PAIRS, 4),
    "untied pairs": (RSAConfig(heads=UNTIED, gate_per_head=False), 8),
    "gates": (RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_per_head=True, parameter_scale=0.7), 2),
    "untied pairs and gates": (RSAConfig(heads=UNTIED), 4),
    "free lags": (RSAConfig(num_regular=1, num_dilated_cyclical_pairs=2, dilation=3, num_free_lags=2), 4),
}


def layer(config):
    heads = RSAHeads(config.layer_specs([H])[0])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1 / heads.spec.layout.scale
    return heads.to(device())


@pytest.mark.slow_unless(backend=["pytorch", "cpp"], causal=[True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("config", "value_heads"), CONFIGS.values(), ids=CONFIGS)
def test_gradients_of_the_parameters_agree_with_dense_p(backend, config, value_heads, causal):
    heads, T = layer(config), 21 if backend == "triton" else 37  # interpreted kernels are slow, and have chunks of 16
    attention = torch.randn(2, T, H, D, device=device(), requires_grad=True)
    value = torch.randn(2, value_heads, T, D, device=device(), requires_grad=True)
    weights, tensors = torch.randn(2, T, H, D, device=device()), [*heads.parameters(), attention, value]
    output = heads(attention, value, AttentionMask(T, T, 0, causal))
    found = torch.autograd.grad(output, tensors, weights)
    exact = equation_4(heads, attention.double(), value, causal=causal)
    assert relative_error(output, exact) < 1e-5
    plain = [head for head in range(H) if head not in heads.spec.layout.heads]
    assert torch.equal(output[:, :, plain], attention[:, :, plain])
    for a, b in zip(found, torch.autograd.grad(exact, tensors, weights.double()), strict=True):
        assert a.dtype == b.dtype == torch.float32 and relative_error(a, b) < 1e-4
    # The control: with another scale of the parameters nothing agrees.
    scaled = dict.fromkeys(("mu", "eta", "nu", "theta"), lambda parameter: 1.1 * parameter)
    assert relative_error(output, equation_4(heads, attention, value, causal=causal, changes=scaled)) > 1e-3
