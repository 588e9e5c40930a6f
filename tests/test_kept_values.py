"""What is kept from call to call, and what must make it be computed again; docs/how_it_works.md lists it."""

import copy
from functools import lru_cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import rsa_hf
import rsa_hf.layer
import rsa_hf.ops.autograd
import rsa_hf.ops.mask
from families import FULL_PLAN, build, inputs, patched, tokens
from rsa_hf import RSAConfig, RSAHeads, patch_model, rem_product
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.problem import rems_and_gate
from rsa_hf.ops.read_mask import read_attention_mask
from rsa_hf.ops.reference import dense_rem_product
from rsa_hf.rem import kept_constants

S = 24
RATES = (["regular", "cos", "sin", "regular"], [0.9, 0.8, -0.7, 0.6], [0.0, 0.3, 0.4, 0.0], [1, 1, 2, 3])


def new_heads():
    return RSAHeads(RSAConfig(**FULL_PLAN).layer_specs([8])[0])


# --- masks ----------------------------------------------------------------------------------------------------------


def padding_mask(hidden):
    shown = torch.arange(11).expand(2, -1) >= torch.tensor([[hidden], [0]])
    return (shown[:, None, None] & torch.ones(11, 11, dtype=torch.bool).tril()).contiguous()


@torch.no_grad()
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_mask_in_a_buffer_that_is_used_again(family, broken, monkeypatch):
    if broken:
        monkeypatch.setattr(rsa_hf.ops.mask, "_is_equal", lambda *_: True)
    model, ids = patched(family), inputs(family)["input_ids"]
    buffer = padding_mask(3)
    model(ids, attention_mask=buffer)
    buffer.data.copy_(padding_mask(6))  # which does not change its version
    found, expected = (model(ids, attention_mask=mask).logits for mask in (buffer, padding_mask(6)))
    assert torch.equal(found, expected) is not broken


@pytest.mark.parametrize("large", [0, 2**13])
@pytest.mark.parametrize("shape", [(2, 1, 7, 7), (2, 1, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16])
def test_masks_are_compared_to_the_last_element(shape, dtype, large, monkeypatch):
    monkeypatch.setattr("rsa_hf.ops.mask.LARGE", large)
    mask = torch.ones(shape).to(dtype)
    for x in (mask, mask.transpose(2, 3), mask[..., 1:], mask[:1].expand(2, -1, -1, -1)):
        copied = x.clone()
        assert rsa_hf.ops.mask._is_equal(copied, x)
        copied[-1, -1, -1, -1] = 0
        assert not rsa_hf.ops.mask._is_equal(copied, x)


def gradient(mask, overwrite, T, heads):
    """∂/∂V of one layer whose mask is overwritten before the backward pass."""
    torch.manual_seed(0)
    value = torch.randn(2, 8, S, 4, requires_grad=True)
    attention = torch.randn(2, T, 8, 4)
    read = read_attention_mask(attention, value, mask, causal=True, aligned_top_left=True)
    out = heads(attention, value, read)
    if overwrite:
        mask.data.fill_(True)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return value.grad


def masks():
    torch.manual_seed(0)
    odd = torch.rand(2, 1, S, S) > 0.4
    padded = (torch.arange(S) > 3).expand(2, -1)
    return {"arbitrary": odd.tril(), "row": (padded[:, None, None]).clone(), "keys": padded.clone()}


@pytest.mark.filterwarnings("ignore:unsupported mask")
@pytest.mark.parametrize("name", ["arbitrary", "row", "keys"])
def test_a_mask_that_is_overwritten_before_the_backward_pass(name):
    heads, T = new_heads(), 1 if name == "row" else S
    expected = gradient(masks()[name], False, T, heads)
    assert torch.equal(gradient(masks()[name], True, T, heads), expected)


# --- constants ------------------------------------------------------------------------------------------------------


def make(numbers, device):
    return torch.tensor(numbers, device=device)


@pytest.mark.parametrize(("keep", "is_right"), [(kept_constants(4), True), (lru_cache(4), False)])
def test_a_constant_belongs_to_no_mode_transform_or_graph(keep, is_right):
    numbers = keep(make)
    with FakeTensorMode():
        assert isinstance(numbers((1, 2), torch.device("cpu")), FakeTensor)
    found = numbers((1, 2), torch.device("cpu"))
    assert isinstance(found, FakeTensor) is not is_right
    with torch.inference_mode():
        assert numbers((3, 4), torch.device("cpu")).is_inference() is not is_right
    torch.func.vmap(lambda x: x * numbers((5.0, 6.0), torch.device("cpu")).sum())(torch.ones(3))
    torch.func.grad(lambda x: (x * numbers((5.0, 7.0), torch.device("cpu"))).sum())(torch.ones(2))
    after = numbers((5.0, 7.0), torch.device("cpu"))
    assert torch._C._functorch.is_functorch_wrapped_tensor(after) is not is_right
    if is_right:
        with FakeTensorMode():  # what is kept already is not for the mode either
            assert isinstance(numbers((1, 2), torch.device("cpu")), FakeTensor)
        assert numbers((1, 2), torch.device("cpu")) is found
        assert numbers((1, 2), torch.device("meta")).is_meta


def test_other_dispatch_modes_see_the_recurrence(monkeypatch):
    value, other = torch.randn(2, 1, 4, S, 4)

    def product(value):
        return rem_product(value, *RATES)

    rates = [torch.tensor(x, dtype=torch.float64) for x in RATES[1:3]]
    expected = dense_rem_product(other, RATES[0], *rates, RATES[3])
    torch.testing.assert_close(make_fx(product)(value)(other), expected, rtol=1e-4, atol=1e-5)
    # The control: an operation that the mode does not see is a constant of its graph.
    monkeypatch.setattr(rsa_hf.ops.autograd, "is_recorded", lambda: False)
    assert isinstance(library(), str) or not torch.allclose(make_fx(product)(value)(other), expected, atol=1e-2)


@pytest.mark.usefixtures("cpu_backend")
def test_a_mask_that_was_read_in_inference_mode_serves_a_training_step():
    model, twin = (patched("llama", "eager") for _ in range(2))
    ids, mask = tokens(2, 9), torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    mask[0, :, :, :3] = False
    with torch.inference_mode():
        model(ids, attention_mask=mask)
    model(ids, attention_mask=mask).logits.sum().backward()
    twin(ids, attention_mask=mask.clone()).logits.sum().backward()
    torch.testing.assert_close(*([parameter.grad for parameter in each.parameters()] for each in (model, twin)))


# --- the default device and dtype -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
@pytest.mark.usefixtures("cpu_backend")
def test_training_and_decoding_inside_another_default_device(family):
    model, batch = build(family), inputs(family, padding=3 if family != "t5" else None)
    twin = patch_model(copy.deepcopy(model), RSAConfig(**FULL_PLAN))
    expected = twin(**batch)[0]
    expected.sum().backward()
    with torch.device("meta"):
        patch_model(model, RSAConfig(**FULL_PLAN))
        found = model(**batch)[0]
        found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            assert torch.equal(own.grad, other.grad), name


def test_a_constant_that_follows_the_default_device_is_caught(monkeypatch):
    arguments = (heads := new_heads()).learned, heads.spec.layout, 1
    expected = rems_and_gate(*arguments)[0].decay
    with torch.device("meta"):
        assert torch.equal(rems_and_gate(*arguments)[0].decay, expected)
        monkeypatch.setattr(rsa_hf.ops.problem, "constant", lambda numbers, _: torch.tensor(numbers))
        assert not torch.equal(rems_and_gate(*arguments)[0].decay, expected)


def test_a_measured_tuning_is_not_used_where_results_must_be_deterministic(monkeypatch):
    tuning = pytest.importorskip("rsa_hf.ops.triton.tuning")
    options = tuning.candidates("forward", 64, 16)
    monkeypatch.setitem(tuning._known, ("question",), options[1])
    asked = (("question",), options, None, torch.device("cuda"))
    assert tuning.fastest(*asked) == options[1]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert tuning.fastest(*asked) == options[0]
