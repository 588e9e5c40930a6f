"""Derivatives other than one backward pass: second ones, forward mode and torch.func, against dense P and differences."""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils.checkpoint import checkpoint
from transformers import StaticCache

import families
from ops.agreement import DILATION as SIX_DILATIONS
from ops.agreement import KINDS as SIX_KINDS
from ops.mixed_product import DILATION, KINDS, draw, mixed_product
from references import relative_error
from rsa_hf import RSAConfig, patch_model, rem_product
from rsa_hf.layer import RSAHeads
from rsa_hf.ops import autograd
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.mask import AttentionMask, segment_index
from rsa_hf.ops.reference import dense_rem_product

NAMES = ("value", "decay", "theta", "attention", "gate")


@pytest.fixture(params=["pytorch", "cpp", "triton"])
def backend(request, monkeypatch):
    if request.param == "triton":
        from ops import kernels_under_test

        kernels_under_test.use_small_chunks(monkeypatch)
    if request.param == "cpp" and isinstance(library(), str):
        pytest.skip(library())
    monkeypatch.setenv("RSA_HF_BACKEND", request.param)


# --- second derivatives of the product ------------------------------------------------------------------------------


def equation_4(tensors, groups, heads, **masks):
    """Eq. 4 by the reference, in ordinary operations."""
    value, decay, theta, attention, gate = tensors
    read = value[:, [head // groups for head in heads]]
    product = dense_rem_product(read, KINDS, decay, theta, DILATION, **masks)
    layer = list(attention.unbind(2))
    for i, head in enumerate(heads):
        layer[head] = (1 - gate[i]) * layer[head] + gate[i] * product[:, i]
    return torch.stack(layer, 2)


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


def agreement(T=21, S=None, groups=1, heads=(0, 2, 3), offset=None, hidden=None, dtype=torch.float32, **masks):
    """Relative errors of second derivatives against those of dense P in float64."""
    S = T if S is None else S
    offset = S - T if offset is None else offset
    tensors = draw(T, S, B=2, D=4, plain=1, groups=groups, value_heads=4 // groups, dtype=dtype)
    tensors[1].data[1] = 0  # a rate that is exactly 0
    tensors[4].data[:] = torch.tensor([0.0, 1.0, 0.4])  # gates that are exactly 0 and 1
    if hidden is not None:
        tensors[0].data[hidden[:, None].expand(-1, 4 // groups, -1)] = torch.nan
        masks["key_mask"] = ~hidden
    numbers = masks.get("documents")
    segments = None if numbers is None else segment_index(numbers)
    where = (masks.get("causal", True), masks.get("key_mask"), segments, masks.get("window"), masks.get("visible"))
    mask = AttentionMask(T, S, offset, *where)
    found = second_derivatives(lambda t: mixed_product(t, KINDS, DILATION, groups, mask, heads), tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    masks = {"query_length": T, "query_offset": offset, **masks}
    expected = second_derivatives(lambda t: equation_4(t, groups, heads, **masks), exact)
    assert all(a.dtype == b.dtype for a, b in zip(found, tensors, strict=True))
    return {name: relative_error(a, b) for name, a, b in zip(NAMES, found, expected, strict=True)}


PADDING = torch.arange(21)[None] < torch.tensor([[5], [0]])
CASES = {
    "causal": {},
    "bidirectional": {"causal": False},
    "keys before the queries": {"T": 18, "S": 30},
    "a few queries": {"T": 3, "S": 30, "offset": 11},
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


@pytest.mark.usefixtures("backend")
def test_second_derivatives_of_every_backend_agree_with_dense_p():
    errors = agreement(hidden=PADDING, groups=2)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_second_derivatives_in_half_precision_agree_with_dense_p(dtype):
    # What half precision rounds away in between is no error of the product; 1 would be one.
    errors = agreement(dtype=dtype, hidden=PADDING)
    assert max(errors.values()) < 0.05, errors


@pytest.mark.skipif(isinstance(library(), str), reason=str(library()))
@pytest.mark.parametrize("missing", ["decay", "theta", "attention", "gate"])
def test_a_missing_second_derivative_is_caught(missing, monkeypatch):
    monkeypatch.setenv("RSA_HF_BACKEND", "cpp")
    original = autograd._backward

    def broken(*arguments):
        gradients = list(original(*arguments))
        gradients[NAMES.index(missing)] = gradients[NAMES.index(missing)].detach()
        return tuple(gradients)

    monkeypatch.setattr(autograd, "_backward", broken)
    assert max(agreement().values()) > 1e-3


def six_heads(rates=(-0.9, 0.95, 0.0, 0.7, 0.5, 0.99)):
    value = torch.randn(2, 6, 5, 2, dtype=torch.float64)
    tensors = (value, torch.tensor(rates, dtype=torch.float64), torch.linspace(0, 2, 6, dtype=torch.float64))
    return tuple(tensor.requires_grad_() for tensor in tensors)


def product(value, decay, theta, **masks):
    return rem_product(value, SIX_KINDS, decay, theta, SIX_DILATIONS, **masks)


@pytest.mark.parametrize("masks", [{}, {"causal": False, "window": 3}], ids=["causal", "window"])
def test_all_modes_agree_with_finite_differences(masks):
    # Fast mode compares projections on random vectors.
    function, tensors = functools.partial(product, **masks), six_heads()
    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, tensors, **modes, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True, fast_mode=True)


def test_third_derivatives_agree_with_finite_differences():
    value, decay, theta = (tensor.detach() for tensor in six_heads())
    direction = torch.randn_like(decay)

    def along(step, order):
        step = torch.tensor(step, dtype=torch.float64, requires_grad=True)
        derivative = product(value, decay + step * direction, theta + step).sin().sum()
        for _ in range(order):
            (derivative,) = torch.autograd.grad(derivative, step, create_graph=True)
        return float(derivative.detach())

    h = 1e-5
    assert along(0.0, 3) == pytest.approx((along(h, 2) - along(-h, 2)) / (2 * h), rel=1e-6)


def test_hessians_agree_in_every_mode():
    value, decay, theta = (tensor.detach() for tensor in six_heads())

    def loss(function, decay):
        return function(value, SIX_KINDS, decay, theta, SIX_DILATIONS).sin().sum()

    mine, functional = functools.partial(loss, rem_product), torch.autograd.functional
    expected = functional.hessian(functools.partial(loss, dense_rem_product), decay)
    tangent = torch.randn_like(decay)
    found = {
        "hessian": functional.hessian(mine, decay),
        "hessian, vectorized": functional.hessian(mine, decay, vectorize=True),
        "forward mode": functional.hessian(mine, decay, vectorize=True, outer_jacobian_strategy="forward-mode"),
        "func.hessian": hessian(mine)(decay),
        "jacrev of jacrev": jacrev(jacrev(mine))(decay),
        "jacfwd of jacfwd": jacfwd(jacfwd(mine))(decay),
    }
    for name, matrix in found.items():
        assert relative_error(matrix, expected) < 1e-10, name
    products = {
        "hvp": functional.hvp(mine, decay, tangent)[1],
        "vhp": functional.vhp(mine, decay, tangent)[1],
        "jvp of grad": jvp(grad(mine), (decay,), (tangent,))[1],
        "linearize": linearize(grad(mine), decay)[1](tangent),
    }
    for name, vector in products.items():
        assert relative_error(vector, expected @ tangent) < 1e-10, name


@pytest.mark.usefixtures("backend")
def test_a_batch_of_gradients_agrees_with_one_after_another():
    tensors = draw(20)
    output = mixed_product(tensors, KINDS, DILATION, 1, AttentionMask(20, 20, 0, True), (0, 1, 2))
    several = torch.randn(3, *output.shape)
    found = torch.autograd.grad(output, tensors, several, is_grads_batched=True, retain_graph=True)
    for i, weights in enumerate(several):
        for a, b in zip(found, torch.autograd.grad(output, tensors, weights, retain_graph=True), strict=True):
            assert relative_error(a[i], b) < 1e-5


def test_a_gradient_with_a_tangent_has_one_afterwards():
    # The output is computed before the level is entered.
    tensors = six_heads()
    output = product(*tensors)
    weights, tangent = torch.randn_like(output), torch.randn_like(output)
    expected = torch.autograd.grad(output, tensors, tangent, retain_graph=True)
    with forward_ad.dual_level():
        found = torch.autograd.grad(output, tensors, forward_ad.make_dual(weights, tangent))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(a).tangent, b)


def test_a_transform_leaves_nothing_behind():
    tensors = [tensor.detach().double() for tensor in draw(9, plain=3)]

    def mixed(*tensors):
        return mixed_product(tensors, KINDS, DILATION, 1, AttentionMask(9, 9, 0, True), (0, 2, 5))

    def transformed():
        return hessian(lambda decay: mixed(tensors[0], decay, *tensors[2:]).sin().sum())(tensors[1])

    tensors[0] = torch.randn(1, 6, 9, 16, dtype=torch.float64)
    expected = transformed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RSA_HF_BACKEND", "pytorch")
        functionalize(mixed)(*tensors)
        assert mixed(*tensors).isfinite().all()
    assert torch.equal(transformed(), expected)


# --- graphs ---------------------------------------------------------------------------------------------------------


class Product(torch.nn.Module):
    def forward(self, value, decay, theta):
        return product(value, decay, theta)


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


def patched(family, attention="eager"):
    model = families.build(family, attention)
    return families.move_rates(patch_model(model, RSAConfig(**families.FULL_PLAN))).double()


def embeddings(model, batch=2, length=11):
    ids = torch.randint(3, families.VOCAB, (batch, length))
    return model.get_input_embeddings()(ids).detach()


PADDED = (torch.arange(11)[None] < torch.tensor([[8], [11]])).long()
PACKED = torch.cat([torch.arange(6), torch.arange(5)])[None].expand(2, -1)
MODELS = {
    "llama": ("llama", {"attention_mask": PADDED}),
    "gpt2": ("gpt2", {"attention_mask": PADDED}),
    "bert": ("bert", {"attention_mask": PADDED}),
    "packed documents": ("llama", {"position_ids": PACKED, "use_cache": False}),
    "sliding window": ("mistral", {}),
}
# Norms of Llama and Mistral are in float32: (step, tolerance) of finite differences.
DIFFERENCES = {"llama": (1e-4, 2e-2), "mistral": (1e-4, 2e-2)}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(("family", "keywords"), MODELS.values(), ids=MODELS)
@pytest.mark.usefixtures("in_float64")
def test_hessian_vector_products_of_a_model_agree_with_finite_differences(family, keywords, checkpointed):
    model = patched(family)
    start = [embeddings(model), *(p.detach() for name, p in model.named_parameters() if ".rsa." in name)]
    names = [name for name, _ in model.named_parameters() if ".rsa." in name]
    vectors = [torch.randn_like(x) * x.abs().mean() for x in start]

    def gradients(tensors, **more):
        def run(embedded, *parameters):
            named = dict(zip(names, parameters, strict=True))
            return functional_call(model, named, (), {"inputs_embeds": embedded, **keywords})[0]

        output = checkpoint(run, *tensors, use_reentrant=False) if checkpointed else run(*tensors)
        return torch.autograd.grad(output.sin().sum(), tensors, **more)

    def shifted(step):
        return [(x + step * vector).requires_grad_() for x, vector in zip(start, vectors, strict=True)]

    inputs = shifted(0.0)
    first = gradients(inputs, create_graph=True)
    found = torch.autograd.grad(sum((g * vector).sum() for g, vector in zip(first, vectors, strict=True)), inputs)
    step, tolerance = DIFFERENCES.get(family, (1e-6, 1e-6))
    for name, a, ahead, behind in zip(
        ["embeddings", *names], found, gradients(shifted(step)), gradients(shifted(-step)), strict=True
    ):
        assert relative_error(a, (ahead - behind) / (2 * step)) < tolerance, name


def parameters_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "attention", "masked"),
    [("bert", "sdpa", False), ("llama", "eager", False), ("mistral", "sdpa", True), ("gpt2", "eager", True)],
)
@pytest.mark.usefixtures("in_float64")
def test_gradients_of_each_sample_agree_with_one_after_another(family, attention, masked):
    model = patched(family, attention)
    ids = torch.randint(3, families.VOCAB, (3, 9))
    masks = (torch.arange(9) >= torch.tensor([[4], [0], [1]])).long()
    parameters = parameters_of(model)

    def loss(parameters, ids, mask):
        keywords = {"attention_mask": mask[None]} if masked else {}
        output = functional_call(model, parameters, (ids[None],), keywords)[0]
        return (output.sin() * mask[None, :, None]).sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, ids, masks)
    for i in range(3):
        expected = torch.autograd.grad(
            loss(dict(model.named_parameters()), ids[i], masks[i]),
            list(model.parameters()),
            allow_unused=True,
            materialize_grads=True,
        )
        for name, one in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[name][i], one, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("in_float64")
def test_forward_mode_of_a_model_agrees_with_backward_mode():
    model = patched("gpt2")
    ids = torch.randint(3, families.VOCAB, (2, 9))
    parameters = parameters_of(model)
    tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def loss(parameters):
        return functional_call(model, parameters, (ids,), {"attention_mask": PADDED[:, :9]})[0].sin().sum()

    found = jvp(loss, (parameters,), (tangents,))[1]
    gradients = torch.autograd.grad(loss(dict(model.named_parameters())), list(model.parameters()))
    expected = sum(float((g * t).sum()) for g, t in zip(gradients, tangents.values(), strict=True))
    assert float(found) == pytest.approx(expected, rel=1e-9)


# --- a step of generation -------------------------------------------------------------------------------------------

LENGTH = 30


def layer():
    return RSAHeads(RSAConfig(**families.FULL_PLAN).layer_plans([8])[0]).double()


def step_masks():
    slots = torch.arange(LENGTH)
    return {
        "last slot": AttentionMask(1, LENGTH, LENGTH - 1, True),
        "window": AttentionMask(1, LENGTH, LENGTH - 1, True, sliding_window=9),
        "padding": AttentionMask(1, LENGTH, LENGTH - 1, True, key_mask=slots[None] >= torch.tensor([[4], [0]])),
    }


def tangents_of_a_step(heads, mask, way):
    """The tangent of a step's output, and the one that dense P gives."""
    attention, value = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((1, 8, 4), (8, LENGTH, 4)))
    with torch.no_grad():
        heads(attention, value, mask)  # whatever is kept from step to step, is kept now
    named = {name: getattr(heads, name).detach() for name in ("mu", "eta", "nu", "theta")}
    primals = (attention, value, *named.values())
    tangents = tuple(torch.randn_like(x) for x in primals)

    def step(attention, value, *parameters):
        return functional_call(heads, dict(zip(named, parameters, strict=True)), (attention, value, mask))

    def reference(attention, value, *parameters):
        plan = heads.plan
        mu, eta, nu, theta = (parameter * plan.parameter_scale for parameter in parameters)
        gate = mu.sigmoid()
        decay, theta = heads.per_head({"lam": eta.tanh(), "gamma": nu.sigmoid(), "theta": theta})
        masks = {"key_mask": mask.key_mask, "window": mask.sliding_window}
        read = value[:, list(plan.heads)]
        product = dense_rem_product(read, plan.kinds, decay, theta, plan.dilations, query_length=1, **masks)
        mixed = list(attention.unbind(2))
        for i, head in enumerate(plan.heads):
            mixed[head] = (1 - gate) * mixed[head] + gate * product[:, i]
        return torch.stack(mixed, 2)

    expected = jvp(reference, primals, tangents)[1]
    if way == "jvp":
        return jvp(step, primals, tangents)[1], expected
    with torch.set_grad_enabled(way == "dual, with gradients"), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        found = forward_ad.unpack_dual(step(*duals)).tangent
        return torch.zeros_like(expected) if found is None else found, expected


@pytest.mark.parametrize("way", ["dual", "dual, with gradients", "jvp"])
@pytest.mark.parametrize("mask", ["last slot", "window", "padding"])
@pytest.mark.usefixtures("in_float64")
def test_forward_mode_of_a_step_agrees_with_dense_p(mask, way):
    found, expected = tangents_of_a_step(layer(), step_masks()[mask], way)
    assert relative_error(found, expected) < 1e-10


def test_dropped_tangents_are_caught(monkeypatch):
    for module in ("rsa_hf.layer", "rsa_hf.ops.decode"):
        monkeypatch.setattr(f"{module}.is_transformed", lambda: False)
    found, expected = tangents_of_a_step(layer(), step_masks()["last slot"], "dual")
    assert relative_error(found, expected) > 1e-2


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.usefixtures("in_float64")
def test_forward_mode_of_a_generated_token_agrees_with_finite_differences(static):
    model = patched("llama")
    embedded = embeddings(model, length=8)
    tangent = torch.randn_like(embedded[:, -1:])

    @torch.no_grad()
    def last(new):
        cache = StaticCache(config=model.config, max_cache_len=12) if static else None
        model_cache = model(inputs_embeds=embedded[:, :-1], past_key_values=cache, use_cache=True).past_key_values
        return model(inputs_embeds=new, past_key_values=model_cache, use_cache=True)[0]

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(last(forward_ad.make_dual(embedded[:, -1:], tangent))).tangent
    h = 1e-4
    expected = (last(embedded[:, -1:] + h * tangent) - last(embedded[:, -1:] - h * tangent)) / (2 * h)
    assert relative_error(found, expected) < 1e-3
