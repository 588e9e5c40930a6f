"""RSA layers with saturated, infinite or huge stored parameters, against eq. 4 in float64, with all gradients."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from references import double_loop
from reliability.extremes import LAYER, LAYER_DILATION, LAYER_KINDS, LAYER_PAIRS, first_turn
from reliability.record import Part, is_full, note
from rsa_hf import RSAConfig, RSAHeads
from rsa_hf.ops.mask import AttentionMask

EXAMPLES = 60 if is_full() else 10
SCALE = 20.0
H, R = 8, 7
NEAR_ONE = math.atanh(1 - 1e-7) / SCALE
PARAMETERS = {
    "mu": (1e4, -1e4, math.inf, -math.inf, 0.02, -0.15, 0.9, -4.0),  # σ(−80) is 2e-35, and float32 ends at 1e-38
    "eta": (1e4, -1e4, math.inf, -math.inf, NEAR_ONE, -NEAR_ONE, 0.48, 0.0, -0.05),
    "nu": (1e4, -1e4, math.inf, -math.inf, 16.1 / SCALE, 1.2, 0.0, 0.05),
    "theta": (0.0, math.pi / 80, 1e4, -1e9, 1e30),
}


@st.composite
def layers(draw):
    plan = replace(LAYER, gate_per_head=draw(st.booleans()))
    if draw(st.booleans()):
        untied = [replace(head, pair=None) for head in plan.counted_heads(0, H)]
        plan = RSAConfig(heads=untied, gate_per_head=plan.gate_per_head, parameter_scale=plan.parameter_scale)
    heads = RSAHeads(plan.layer_plans([H])[0])
    with torch.no_grad():
        for name, choices in PARAMETERS.items():
            parameter = getattr(heads, name)
            parameter.copy_(torch.tensor([draw(st.sampled_from(choices)) for _ in range(len(parameter))]))
    T, B = draw(st.sampled_from((1, 2, 9, 33))), draw(st.sampled_from((0, 1, 2)))
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16)))
    size = draw(st.sampled_from(("one", "largest")))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    attention, value, weights = (
        torch.rand(B, *shape, 2, generator=generator, dtype=torch.float64) * 2 - 1
        for shape in ((T, H), (4, T), (T, H))
    )
    if size == "largest":
        most = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 8 * T)
        attention, value = attention * most, value * most
        weights = weights / (16 * T * T * max(B, 1))
    return heads, attention.to(dtype), value.to(dtype), weights.to(dtype), draw(st.booleans())


def pairs_of(plan):
    return LAYER_PAIRS if len(plan.nu) == 2 else (None, None, 0, 1, None, 2, 3)


def mixed(heads, attention, value, weights, causal, magnitudes=False):
    """Eq. 4 and its gradients, or the same for the magnitudes of all terms, with 1 for cosines."""
    plan, size = heads.plan, abs if magnitudes else (lambda x: x)
    leaves = {name: size(getattr(heads, name).detach().double()).requires_grad_() for name in ("mu", "eta", "nu")}
    leaves["theta"] = torch.tensor([first_turn(SCALE * x) for x in heads.theta.tolist()], dtype=torch.float64)
    leaves["theta"].requires_grad_()
    if magnitudes:
        leaves["mu"] = heads.mu.detach().double().requires_grad_()
    for name, tensor in {"attention": attention, "value": value}.items():
        leaves[name] = size(tensor.double()).clone().requires_grad_()
    lam, gamma = torch.tanh(SCALE * leaves["eta"]), torch.sigmoid(SCALE * heads.nu.detach().double())
    if not magnitudes:
        gamma = torch.sigmoid(SCALE * leaves["nu"])
    own_lam = iter(lam)
    decay = torch.stack([next(own_lam) if pair is None else gamma[pair] for pair in pairs_of(plan)])
    if magnitudes:
        decay.retain_grad()
    theta = torch.stack([torch.zeros(()).double() if i is None else leaves["theta"][i] for i in pairs_of(plan)])
    kinds = ("regular",) * R if magnitudes else LAYER_KINDS
    T = value.shape[2]
    keys = leaves["value"].repeat_interleave(2, 1)[:, :R]
    product = double_loop(keys, kinds, decay, theta, LAYER_DILATION, T, 0, causal).transpose(1, 2)
    gate = torch.sigmoid(SCALE * leaves["mu"]).expand(R)[:, None]
    softmax = leaves["attention"][:, :, :R]
    one = (1 + gate) if magnitudes else (1 - gate)
    output = torch.cat([one * softmax + gate * product, leaves["attention"][:, :, R:]], 2)
    finite = [torch.where(leaf.isfinite(), leaf, 0).sum() for leaf in (*leaves.values(), decay)]
    loss = (output * size(weights.double())).sum() + 0 * sum(finite)  # so that each has a gradient
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    gradients["theta"] = SCALE * gradients["theta"]
    if magnitudes:
        # For each head, |∂/∂θ| ≤ Σ τ ρ^τ |v|, and ∂γ/∂ν = γ (1 − γ).
        of_pairs = [
            sum((decay.grad[h] for h, own in enumerate(pairs_of(plan)) if own == i), torch.zeros(()).double())
            for i in range(len(heads.nu))
        ]
        gradients["theta"] = SCALE * torch.stack(of_pairs)
        gradients["nu"] = gradients["theta"] * gamma * (1 - gamma)
    return {"output": output.detach(), **gradients}


def test_layers_with_extreme_parameters_are_right():
    tried = {"right": 0}

    @settings(max_examples=EXAMPLES, phases=(Phase.explicit, Phase.generate))
    @given(layer=layers())
    def test(layer):
        heads, attention, value, weights, causal = layer
        T = value.shape[2]
        inputs = [tensor.clone().requires_grad_() for tensor in (attention, value)]
        output = heads(*inputs, AttentionMask(T, T, 0, causal))
        output.backward(weights)
        found = {"output": output.detach(), "attention": inputs[0].grad, "value": inputs[1].grad}
        found |= {name: getattr(heads, name).grad for name in PARAMETERS}
        right = mixed(heads, attention, value, weights, causal)
        sizes = mixed(heads, attention, value, weights, causal, magnitudes=True)
        working = torch.float64 if attention.dtype == torch.float64 else torch.float32
        for name, exact in right.items():
            mine, stored = found[name], torch.finfo(found[name].dtype)
            fits = exact.abs() < stored.max * 0.99
            assert bool(mine.isfinite()[fits].all()), name
            # A gate or rate in float64 has the digits that 1 − g needs, except for the last ones of 1 − tanh².
            allowed = 128 * torch.finfo(working).eps * sizes[name] + stored.eps * exact.abs() + 1e-30
            if name in ("value", "attention", "output"):
                allowed += stored.tiny * stored.eps
            else:
                allowed += 1e-15 * SCALE * float(sizes["theta"].sum() + sizes["mu"].sum()) + 1e-30
            off = ((mine.double() - exact).abs() / allowed)[fits]
            assert off.numel() == 0 or float(off.max()) <= 1, f"{name}: {float(off.max()):.3g} times the error allowed"
        tried["right"] += 1

    test()
    note(Part.NUMBERS, "layers with saturated, infinite and huge stored parameters: output and every gradient", tried)


@pytest.mark.parametrize("eta", [7.0, 8.4, 10.0, 14.0])
def test_a_rate_that_float32_cannot_tell_from_one_still_learns(eta):
    plan = RSAConfig(num_regular=1, parameter_scale=1, gate_init=0.0).layer_plans([1])[0]
    heads = RSAHeads(plan)
    value = torch.ones(1, 1, 300, 1)
    with torch.no_grad():
        heads.eta.fill_(eta)
    heads(torch.zeros(1, 300, 1, 1), value, AttentionMask(300, 300, 0, True)).sum().backward()
    lam = math.tanh(float(heads.eta))
    slope = sum(k * lam ** (k - 1) for t in range(300) for k in range(1, t + 1)) / 2
    expected = slope / math.cosh(float(heads.eta)) ** 2
    assert float(heads.eta.grad) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mu", [-math.inf, -1e4])
def test_nothing_overflows_behind_a_shut_gate(dtype, mu):
    heads = RSAHeads(RSAConfig(num_regular=2, num_cyclical_pairs=1).layer_plans([4])[0])
    with torch.no_grad():
        heads.mu.fill_(mu)
        heads.eta.fill_(1e4)
    most = torch.finfo(dtype).max
    value, attention = torch.full((1, 4, 40, 3), most, dtype=dtype), torch.full((1, 40, 4, 3), -most, dtype=dtype)
    value.requires_grad_()
    for T in (40, 1):
        output = heads(attention[:, -T:], value, AttentionMask(T, 40, 40 - T, True))
        assert torch.equal(output, attention[:, -T:])
    with torch.no_grad():
        assert torch.equal(heads(attention[:, -1:], value, AttentionMask(1, 40, 39, True)), attention[:, -1:])
    heads(attention, value, AttentionMask(40, 40, 0, True)).float().mean().backward()
    assert all(float(parameter.grad.abs().sum()) == 0 for parameter in heads.parameters())
