"""Whole patched models with extreme numbers are finite and agree with a float64 model with P V written out."""

import copy
import warnings

import pytest
import torch

from families import VOCAB, build
from models import tiny
from references import double_loop, relative_error
from reliability.extremes import LAYER, LAYER_DILATION, LAYER_KINDS
from reliability.record import Part, note
from rsa_hf import RSAHeads, patch_model
from rsa_hf.ops.read_mask import flash_segment_ids

R = len(LAYER_KINDS)
SATURATED = {"eta": (1e4, -1e4, 0.42), "nu": (0.8, 1e4), "theta": (1e9, -0.3), "mu": (0.02,)}
FAMILIES = ("gpt2", "bert", "llama", "transformer_xl")
T = 13


def model_of(family, attention="sdpa"):
    if family == "transformer_xl":
        return tiny.build("transfo-xl", attention).base_model
    return build(family, attention)


def patched(model):
    patch_model(model, LAYER)
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, RSAHeads)):
            for name, numbers in SATURATED.items():
                getattr(layer, name).copy_(torch.tensor(numbers))
    return model


def case(family, name):
    """Inputs, the keys that each query sees, [B, 1, T, T], the direction, and which tokens are real."""
    causal = family != "bert"
    batch, length = 2, 1 if name == "one token" else T
    documents = torch.zeros(batch, length, dtype=torch.long)
    real = torch.ones(batch, length, dtype=torch.bool)
    # With a cache, transformers reads no row as packed.
    inputs = {} if family == "transformer_xl" or not causal else {"use_cache": False}
    if name == "a row of padding":
        real[0] = False
        real[1, :4] = False
    elif name == "nothing but padding":
        real[:] = False
    elif name == "single tokens":
        batch, documents, real = 1, torch.arange(length)[None], real[:1]
        inputs["position_ids"] = torch.zeros(1, length, dtype=torch.long)
    elif name == "packed":
        batch, real = 1, real[:1]
        inputs["position_ids"] = torch.tensor([[0, 0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 0]])
        documents = (inputs["position_ids"] == 0).cumsum(1)
    inputs["input_ids"] = torch.randint(3, 29 if family == "transformer_xl" else VOCAB, (batch, length))
    if not bool(real.all()):
        inputs["attention_mask"] = real.long()
    visible = (documents[:, :, None] == documents[:, None]) & real[:, None]
    return inputs, (visible.tril() if causal else visible)[:, None], causal, real


def written_out(visible, causal):
    """A replacement for `RSAHeads.forward`: eq. 4 in float64, with P V as a double loop over the stored parameters."""

    def forward(self, attention, value, mask):
        eta, nu, theta, mu = (getattr(self, name).double() * 20 for name in ("eta", "nu", "theta", "mu"))
        lam, gamma, gate = torch.tanh(eta), torch.sigmoid(nu), torch.sigmoid(mu)
        decay = torch.stack([lam[0], lam[1], gamma[0], gamma[0], lam[2], gamma[1], gamma[1]])
        angle = torch.atan2(theta.sin(), theta.cos())[[0, 0, 0, 0, 0, 1, 1]]
        keys = value.repeat_interleave(attention.shape[2] // value.shape[1], 1)[:, :R]
        seen = visible.expand(len(value), -1, -1, -1)
        product = double_loop(keys, LAYER_KINDS, decay, angle, LAYER_DILATION, value.shape[2], 0, causal, seen)
        product = product + 0 * (decay.sum() + angle.sum())  # so that each has a gradient
        mixed = (1 - gate) * attention[:, :, :R] + gate * product.transpose(1, 2)
        return torch.cat([mixed, attention[:, :, R:]], 2)

    return forward


def run(model, inputs, weights=None):
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(**inputs).last_hidden_state
    if weights is not None:
        (output.double() * weights).sum().backward()
    return output.detach()


def gates_and_rates(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if ".rsa." in name}


CASES = ("plain", "one token", "a row of padding", "nothing but padding", "single tokens", "packed")
PAIRS = [
    (family, name)
    for family in FAMILIES
    for name in CASES
    # BERT and Transformer-XL take no packed rows.
    if family in ("gpt2", "llama") or name not in ("single tokens", "packed")
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_are_finite_and_as_exact_as_the_plain_model(family, name, attention, monkeypatch):
    inputs, visible, causal, real = case(family, name)
    plain = model_of(family, attention)
    model = patched(copy.deepcopy(plain))
    exact_plain, exact_model = copy.deepcopy(plain).double(), copy.deepcopy(model).double()
    for exact in (exact_plain, exact_model):
        exact.set_attn_implementation("sdpa")  # in float64, eager attention gives NaN for rows of padding
    right_plain = run(exact_plain, inputs)
    # The output of padding is not used, and differs between dtypes in plain models too.
    weights = torch.randn(right_plain.shape, dtype=torch.float64) * real[..., None]
    with monkeypatch.context() as patch:
        patch.setattr(RSAHeads, "forward", written_out(visible, causal))
        right = run(exact_model, inputs, weights)
        expected = gates_and_rates(exact_model)
    effect = relative_error(right[real], right_plain[real])
    outcomes = {"effect": effect}
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
        outcomes[f"{str(dtype).removeprefix('torch.')}: error / the plain model's"] = error / max(own, 1e-12)
    note(Part.NUMBERS, f"{family}, {attention}: {name}", outcomes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_empty_batches_give_what_the_plain_model_gives(family, shape):
    plain = model_of(family)
    model = patched(copy.deepcopy(plain))
    ids = torch.zeros(shape, dtype=torch.long)
    try:
        expected = plain(input_ids=ids).last_hidden_state
    except Exception as error:
        with pytest.raises(type(error)):
            model(input_ids=ids)
        return
    found = model(input_ids=ids).last_hidden_state
    assert found.shape == expected.shape
    found.sum().backward()


@pytest.mark.parametrize("positions", [torch.zeros(1, T), torch.zeros(2, T)], ids=["a row", "two rows"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_position_ids_that_make_every_token_a_document_warn(family, positions):
    model = patched(model_of(family))
    ids = torch.randint(3, VOCAB, positions.shape)
    with pytest.warns(UserWarning, match="check position_ids"):
        model(input_ids=ids, position_ids=positions.long(), use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=ids)
        model(input_ids=ids, attention_mask=torch.ones_like(ids).index_fill(1, torch.arange(T - 1), 0))
        model(input_ids=ids[:1], position_ids=torch.tensor([[0, 0, 1, *range(T - 3)]]), use_cache=False)
        model(input_ids=ids[:, :1], position_ids=torch.zeros(len(ids), 1, dtype=torch.long), use_cache=False)


def test_flash_attention_gives_the_same_warning():
    query = key = torch.empty(1, 8, T, 4)
    with pytest.warns(UserWarning, match="check position_ids"):
        assert len(flash_segment_ids(query, key, {"position_ids": torch.zeros(1, T)}).unique()) == T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flash_segment_ids(query, key, {"position_ids": torch.arange(T)[None]}) is None
