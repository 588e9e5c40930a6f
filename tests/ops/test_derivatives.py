"""Derivatives other than one backward pass: second ones, forward mode and torch.func, against dense P and differences."""

import functools

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import families
from ops import mixed_product
from ops.agreement import Product, product
from references import relative_error
from rsa_hf import RSAConfig
from rsa_hf.layer import RSAHeads
from rsa_hf.ops import autograd
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.mask import AttentionMask

# --- second derivatives of the product ------------------------------------------------------------------------------


def second_derivatives(function, tensors):
    """The gradients of a weighted sum of gradients. V feeds attention as well, as it does in a model."""
    generator = torch.Generator().manual_seed(1)

    def weights(x):
        return torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype)

    value, decay, theta, attention, gate = tensors
    attention = attention * torch.where(value.isnan(), 0, value).sin().mean()
    output = function([value, decay, theta, attention, gate])
    first = torch.autograd.grad((output.sin() * weights(output)).sum(), tensors, create_graph=True)
    return torch.autograd.grad(sum((x * weights(x)).sum() for x in first), tensors)


def agreement(T=21, S=None, groups=1, heads=(0, 2, 3), hidden=None, dtype=torch.float32, **masks):
    """Relative errors of second derivatives against those of dense P in float64."""
    tensors = mixed_product.draw(T, S, B=2, D=4, plain=1, groups=groups, value_heads=4 // groups, dtype=dtype)
    tensors[1].data[1] = 0  # a rate that is exactly 0
    tensors[4].data[:] = torch.tensor([0.0, 1.0, 0.4])  # gates that are exactly 0 and 1
    if hidden is not None:
        tensors[0].data[hidden[:, None].expand(-1, 4 // groups, -1)] = torch.nan
        masks["key_mask"] = ~hidden
    return mixed_product.agreement(tensors, groups=groups, heads=heads, derivatives=second_derivatives, **masks)


PADDING = torch.arange(21)[None] < torch.tensor([[5], [0]])
HIDDEN = {
    "hidden": torch.arange(30) == torch.tensor([[21], [22]]),
    "documents": torch.arange(30)[None] // torch.tensor([[16], [40]]),
}
CASES = {
    "causal": {},
    "bidirectional": {"causal": False},
    "keys before the queries": {"T": 18, "S": 30},
    "a few queries": {"T": 3, "S": 30, "offset": 11},
    "a few queries, bidirectional": {"T": 5, "S": 30, "offset": 20, "causal": False},
    "a few queries, all masks": {"T": 5, "S": 30, "offset": 20, "window": 7, **HIDDEN},
    "padding": {"hidden": PADDING},
    "documents": {"documents": torch.arange(21)[None] // torch.tensor([[6], [13]]), "causal": False},
    "window": {"window": 5, "hidden": PADDING},
    "visible": {"visible": torch.rand(2, 1, 21, 21, generator=torch.Generator().manual_seed(0)) < 0.6},
    "grouped values": {"groups": 2, "heads": (0, 1, 3)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_second_derivatives_agree_with_dense_p(case):
    errors = agreement(**case)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.usefixtures("backend")
def test_second_derivatives_of_every_backend_agree_with_dense_p(dtype, tolerance):
    # What half precision rounds away in between is no error of the product; 1 would be one.
    errors = agreement(hidden=PADDING, groups=2, dtype=dtype)
    assert max(errors.values()) < tolerance, errors


@pytest.mark.skipif(isinstance(library(), str), reason=str(library()))
@pytest.mark.parametrize("missing", ["decay", "theta", "attention", "gate"])
def test_a_missing_second_derivative_is_caught(missing, monkeypatch):
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", "cpp")
    original = autograd._backward_in_pytorch

    def broken(*arguments):
        gradients = list(original(*arguments))
        for place in {"attention": (1,), "gate": (2,), "decay": (3, 4), "theta": (5,)}[missing]:
            gradients[place] = gradients[place].detach()
        return tuple(gradients)

    monkeypatch.setattr(autograd, "_backward_in_pytorch", broken)
    assert max(agreement().values()) > 1e-3


def six_heads(rates=(-0.9, 0.95, 0.0, 0.7, 0.5, 0.99)):
    value = torch.randn(2, 6, 5, 2, dtype=torch.float64)
    tensors = (value, torch.tensor(rates, dtype=torch.float64), torch.linspace(0, 2, 6, dtype=torch.float64))
    return tuple(tensor.requires_grad_() for tensor in tensors)


@pytest.mark.parametrize("masks", [{}, {"causal": False, "sliding_window": 3}], ids=["causal", "window"])
def test_all_modes_agree_with_finite_differences(masks):
    # Fast mode compares projections on random vectors.
    function, tensors = functools.partial(product, **masks), six_heads()
    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, tensors, **modes, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True, fast_mode=True)


def rates_second_derivatives(function, tensors):
    first = torch.autograd.grad(function(*tensors).sin().sum(), tensors, create_graph=True)
    return torch.cat([x.flatten() for x in torch.autograd.grad(sum(x.square().sum() for x in first), tensors)])


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_has_right_derivatives_or_an_error():
    tensors = six_heads()
    values = tuple(tensor.detach() for tensor in tensors)
    tangents = tuple(torch.randn_like(value) for value in values)
    expected = rates_second_derivatives(product, tensors)
    program = torch.export.export(Product(), values).module()
    compiled = torch.compile(product, backend="eager", fullgraph=True)
    for function in (program, compiled):
        assert relative_error(rates_second_derivatives(function, tensors), expected) < 1e-10
    with pytest.raises(RuntimeError, match="double backward"):
        rates_second_derivatives(torch.compile(product, backend="aot_eager"), tensors)
    with pytest.raises(NotImplementedError, match="rsa_hf::recurrence.*forward-mode"):
        jvp(program, values, tangents)
    inside = torch.compile(lambda *t: jvp(product, t, tangents)[1], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(inside(*values), jvp(product, values, tangents)[1])


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_float64(monkeypatch):
    """RSAHeads keep their parameters in float32, too coarse for finite differences."""
    monkeypatch.setattr(RSAHeads, "_apply", torch.nn.Module._apply)


@pytest.mark.parametrize(
    ("family", "attention", "masked"), [("bert", "sdpa", False), ("mistral", "sdpa", True), ("gpt2", "eager", True)]
)
@pytest.mark.usefixtures("in_float64")
def test_gradients_of_each_sample_agree_with_one_after_another(family, attention, masked):
    model = families.patched(family, attention, make=families.build).double()
    ids = torch.randint(3, families.VOCAB, (3, 9))
    masks = (torch.arange(9) >= torch.tensor([[4], [0], [1]])).long()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, ids, mask):
        keywords = {"attention_mask": mask[None]} if masked else {}
        output = functional_call(model, parameters, (ids[None],), keywords)[0]
        return (output.sin() * mask[None, :, None]).sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, ids, masks)
    for i in range(3):
        model.zero_grad()
        loss(dict(model.named_parameters()), ids[i], masks[i]).backward()
        for name, parameter in model.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name][i], expected, rtol=1e-6, atol=1e-9)


def penalised(model, ids):
    """A loss and the square of its gradient."""
    embedded = model.get_input_embeddings()(ids)
    loss = model(inputs_embeds=embedded, use_cache=False).logits.sin().sum()
    return loss + torch.autograd.grad(loss, embedded, create_graph=True)[0].square().sum()


def in_an_operator(model, ids):
    """A loss under an unsupported mask, from the operator of graphs."""
    mask = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(0)) < 0.7
    with FlopCounterMode(display=False):
        return model(ids, attention_mask=mask, use_cache=False).logits.sin().sum()


def error_of_gradients(model, twin):
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(relative_error(found.grad, wanted.grad) for found, wanted in pairs)


@pytest.mark.filterwarnings("ignore:unsupported mask")
@pytest.mark.parametrize("loss", [penalised, in_an_operator])
@pytest.mark.usefixtures("cpu_backend")
def test_derivatives_agree_under_hooks_on_saved_tensors(loss):
    ids, (plain, saved, checkpointed) = families.tokens(), (families.patched("llama", "eager") for _ in range(3))
    loss(plain, ids).backward()
    with save_on_cpu():
        loss(saved, ids).backward()
    checkpoint(loss, checkpointed, ids, use_reentrant=False).backward()
    assert max(error_of_gradients(each, plain) for each in (saved, checkpointed)) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_backward_pass_that_is_compiled_alone_gives_the_same():
    model, twin = (families.patched("llama") for _ in range(2))
    for ids in (families.tokens(), families.tokens(3, 7)):
        padded = torch.arange(ids.shape[1]).expand_as(ids) > torch.arange(len(ids))[:, None]
        output, wanted = (each(ids, attention_mask=padded).logits[:, -4:].sin().sum() for each in (model, twin))
        wanted.backward()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            output.backward()
        assert error_of_gradients(model, twin) < 1e-5


# --- a step of generation -------------------------------------------------------------------------------------------

LENGTH = 30
STEPS = {
    "last slot": {},
    "window": {"sliding_window": 9},
    "padding": {"key_mask": torch.arange(LENGTH)[None] >= torch.tensor([[4], [0]])},
}


def tangents_of_a_step(masks, way):
    """The tangent of a step's output, and the one that finite differences give."""
    heads = RSAHeads(RSAConfig(**families.FULL_PLAN).layer_specs([8])[0]).double()
    names = ("mu", "eta", "nu", "theta")
    shapes = (torch.randn(2, 1, 8, 4), torch.randn(2, 8, LENGTH, 4))
    primals = (*(x.double() for x in shapes), *(getattr(heads, name).detach() for name in names))
    tangents = tuple(torch.randn_like(x) * x.abs().mean() for x in primals)

    def step(attention, value, *parameters):
        mask = AttentionMask(1, LENGTH, LENGTH - 1, True, **masks)
        return functional_call(heads, dict(zip(names, parameters, strict=True)), (attention, value, mask))

    def shifted(h):
        return step(*(x + h * t for x, t in zip(primals, tangents, strict=True)))

    with torch.no_grad():
        expected = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
    if way == "jvp":
        return jvp(step, primals, tangents)[1], expected
    with torch.set_grad_enabled(way == "dual, with gradients"), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        found = forward_ad.unpack_dual(step(*duals)).tangent
        return torch.zeros_like(expected) if found is None else found, expected


@pytest.mark.parametrize("way", ["dual", "dual, with gradients", "jvp"])
@pytest.mark.parametrize("masks", STEPS.values(), ids=STEPS)
@pytest.mark.usefixtures("in_float64")
def test_forward_mode_of_a_step_agrees_with_finite_differences(masks, way):
    found, expected = tangents_of_a_step(masks, way)
    assert relative_error(found, expected) < 1e-6


@pytest.mark.skipif(isinstance(library(), str), reason=str(library()))
@pytest.mark.usefixtures("in_float64")
def test_tangents_are_never_dropped_in_silence(monkeypatch):
    monkeypatch.setattr("rsa_hf.ops.autograd.is_transformed", lambda: False)
    with pytest.raises(RuntimeError, match="jvp"):
        tangents_of_a_step({}, "dual")
