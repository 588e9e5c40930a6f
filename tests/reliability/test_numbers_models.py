"""RSA layers and whole models with extreme gates and rates are finite and right; the reference has dense P."""

import copy
import math
import warnings

import pytest
import torch

from families import VOCAB, build
from models import tiny
from ops.mixed_product import device
from references import equation_4, relative_error
from reliability.test_numbers import first_turn
from rsa_hf import RSAConfig, RSAHeads, patch_model
from rsa_hf.ops.mask import AttentionMask

LAYER = RSAConfig(
    num_regular=2, num_cyclical_pairs=1, num_dilated_regular=1, num_dilated_cyclical_pairs=1, dilation=[2, 3, 40]
)
NEAR_ONE = math.atanh(1 - 1e-7) / 20  # η of such a λ
STORED = {
    "saturated": {"eta": (1e4, -1e4, 0.42), "nu": (0.8, 1e4), "theta": (1e9, -0.3), "mu": (0.02,)},
    "infinite": {"eta": (math.inf, 0.0, -math.inf), "nu": (math.inf, -math.inf), "theta": (1e30, 0.0), "mu": (0.0,)},
    "open": {"eta": (NEAR_ONE, -0.05, 0.0), "nu": (0.805, 0.0), "theta": (-1e9, 1e4), "mu": (math.inf,)},
}
FAMILIES = ("gpt2", "bert", "llama", "transformer_xl")
CASES = ("plain", "one token", "a row of padding", "nothing but padding", "single tokens", "packed")
T = 13


def model_of(family, attention="sdpa"):
    return tiny.build("transfo-xl", attention).base_model if family == "transformer_xl" else build(family, attention)


def patched(model, stored="saturated"):
    patch_model(model, LAYER)
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, RSAHeads)):
            for name, numbers in STORED[stored].items():
                getattr(layer, name).copy_(torch.tensor(numbers))
    return model


def first_turns(theta):
    """The angles modulo 2π, with the gradient of θ."""
    return theta - theta.detach() + torch.tensor([first_turn(x) for x in theta.tolist()], dtype=torch.float64)


def case(family, name):
    """Inputs, the keys that each query sees, [B, 1, T, T], the direction, and which tokens are real."""
    causal, batch, length = family != "bert", 2, 1 if name == "one token" else T
    documents = torch.zeros(batch, length, dtype=torch.long)
    real = torch.ones(batch, length, dtype=torch.bool)
    # With a cache, transformers reads no row as packed.
    inputs = {} if family == "transformer_xl" or not causal else {"use_cache": False}
    if name == "a row of padding":
        real[0] = False
        real[1, :4] = False
    elif name == "nothing but padding":
        real[:] = False
    elif name in ("single tokens", "packed"):
        starts = [0] * T if name == "single tokens" else [0, 0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 0]
        batch, real, inputs["position_ids"] = 1, real[:1], torch.tensor([starts])
        documents = (inputs["position_ids"] == 0).cumsum(1)
    inputs["input_ids"] = torch.randint(3, 29 if family == "transformer_xl" else VOCAB, (batch, length))
    if not bool(real.all()):
        inputs["attention_mask"] = real.long()
    visible = (documents[:, :, None] == documents[:, None]) & real[:, None]
    return inputs, (visible.tril() if causal else visible)[:, None], causal, real


def run(model, inputs, weights=None):
    """The last hidden states, after a backward pass where there are weights of a loss."""
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(**inputs).last_hidden_state
    if weights is not None:
        (output.double() * weights).sum().backward()
    return output.detach()


def gates_and_rates(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if ".rsa." in name}


@pytest.mark.slow_unless(stored=["saturated", "infinite"])
@pytest.mark.parametrize(
    ("attention", "stored"), [("sdpa", "saturated"), ("eager", "saturated"), ("sdpa", "infinite"), ("sdpa", "open")]
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_finite_and_as_exact_as_the_plain_model(family, name, attention, stored, monkeypatch):
    if family in ("bert", "transformer_xl") and name in ("single tokens", "packed"):
        pytest.skip("takes no packed rows")
    inputs, visible, causal, real = case(family, name)
    plain = model_of(family, attention)
    model = patched(copy.deepcopy(plain), stored)
    exact_plain, exact_model = copy.deepcopy(plain).double(), copy.deepcopy(model).double()
    for exact in (exact_plain, exact_model):
        exact.set_attn_implementation("sdpa")  # in float64, eager attention gives NaN for rows of padding
    right_plain = run(exact_plain, inputs)
    # The output of padding is not used, and differs between dtypes in plain models too.
    weights = torch.randn(right_plain.shape, dtype=torch.float64) * real[..., None]

    def written_out(self, attention, value, *_):
        seen = visible.expand(len(value), -1, -1, -1)
        return equation_4(self, attention, value, changes={"theta": first_turns}, visible=seen, causal=causal)

    with monkeypatch.context() as patch:
        patch.setattr(RSAHeads, "forward", written_out)
        right = run(exact_model, inputs, weights)
        expected = gates_and_rates(exact_model)
    effect = relative_error(right[real], right_plain[real])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low, low_plain = copy.deepcopy(model).to(dtype), copy.deepcopy(plain).to(dtype)
        found = run(low, inputs, weights)
        assert bool(found.isfinite().all())
        error = relative_error(found[real], right[real])
        own = relative_error(run(low_plain, inputs)[real], right_plain[real])
        # As close to float64 as the plain model, times what sums over the whole text amplify.
        allowed = 5 * own + 4 * torch.finfo(dtype).eps
        assert error <= allowed, f"{dtype}: {error:.2g}, the plain model {own:.2g}"
        if bool(real.any()) and name != "one token" and dtype == torch.float32:
            assert effect > 100 * allowed
        for key, gradient in gates_and_rates(low).items():
            assert bool(gradient.isfinite().all()), key
            if dtype == torch.float32:
                off = (gradient - expected[key]).abs().max()
                scale = max(float(g.abs().max()) for n, g in expected.items() if n.endswith(key[-5:]))
                assert float(off) <= 1e-4 * max(scale, 1e-6), f"{key}: {gradient} for {expected[key]}"


@pytest.mark.parametrize("eta", [7.0, 8.4, 10.0, 14.0])
def test_a_rate_that_float32_cannot_tell_from_one_still_learns(eta):
    heads = RSAHeads(RSAConfig(num_regular=1, parameter_scale=1, gate_init=0.0).layer_specs([1])[0])
    with torch.no_grad():
        heads.eta.fill_(eta)
    heads(torch.zeros(1, 300, 1, 1), torch.ones(1, 1, 300, 1), AttentionMask(300, 300, 0, True)).sum().backward()

    def slope(lam):
        return sum(k * lam ** (k - 1) for t in range(300) for k in range(1, t + 1)) / 2

    expected = slope(math.tanh(eta)) / math.cosh(eta) ** 2
    assert float(heads.eta.grad) == pytest.approx(expected, rel=1e-3)
    lam = torch.tensor(eta).tanh().item()  # the broken variant: the rate in float32
    assert eta < 8 or slope(lam) * (1 - lam**2) != pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mu", [-math.inf, -1e4])
def test_nothing_overflows_behind_a_shut_gate(dtype, mu):
    heads = RSAHeads(RSAConfig(num_regular=2, num_cyclical_pairs=1).layer_specs([4])[0]).to(device())
    with torch.no_grad():
        heads.mu.fill_(mu)
        heads.eta.fill_(1e4)
    most, options = torch.finfo(dtype).max, {"dtype": dtype, "device": device()}
    value, attention = torch.full((1, 4, 20, 3), most, **options), torch.full((1, 20, 4, 3), -most, **options)
    for T in (20, 1):
        mask = AttentionMask(T, 20, 20 - T, True)
        with torch.no_grad():
            assert torch.equal(heads(attention[:, -T:], value, mask), attention[:, -T:])
        mixed = heads(attention[:, -T:], value.requires_grad_(), mask)
        assert torch.equal(mixed, attention[:, -T:])
        heads.zero_grad()
        mixed.float().mean().backward()
        assert all(float(parameter.grad.abs().sum()) == 0 for parameter in heads.parameters())
