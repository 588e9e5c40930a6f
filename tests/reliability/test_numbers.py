"""P V and RSA layers with extreme numbers are finite, and as exact as a double loop in float64 allows.

The double loop runs twice. The second run sums magnitudes (|λ|, |v|, and 1 for cosines). The error allowed is a few
roundings of that sum, whatever cancels in the result.
"""

import cmath
import math
from collections import Counter

import mpmath
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter
from transformers import GPT2Config, GPT2Model

from references import double_loop
from reliability.record import Part, is_full, note
from rsa_hf import RSAConfig, patch_model, rem_product
from rsa_hf.ops.mask import AttentionMask

EXAMPLES = 80 if is_full() else 12
NEAR_ONE = 1 - 1e-7
RATES = (NEAR_ONE, 1.0, 0.0, 1e-30, 1e-38, 0.5, 0.93)
ANGLES = (0.0, math.pi, 1e-30, 2.0, -1e4, 1e9, 1e30)
LENGTHS = (1, 2, 3, 7, 16, 17, 33, 35)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BACKENDS = ("chunked", "cpp", "dense")
GRADIENTS = ("dV", "d decay", "d theta")


def some(examples):
    return settings(max_examples=examples, phases=(Phase.explicit, Phase.generate))


# --- P V -----------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw, dtypes=DTYPES):
    """The arguments of `rem_product` as (positional, keywords), which keys each query sees, and weights of a loss."""
    T = draw(st.sampled_from(LENGTHS))
    S = T + draw(st.sampled_from((0, 0, 1, 19)))
    B, D, groups = draw(st.sampled_from((0, 1, 2))), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    dtype, size = draw(st.sampled_from(dtypes)), draw(st.sampled_from(("subnormal", "one", "largest")))
    kinds = tuple(draw(st.lists(st.sampled_from(("regular", "cos", "sin")), min_size=1, max_size=3)))
    signs = [draw(st.sampled_from((-1, 1))) if kind == "regular" else 1 for kind in kinds]
    decay = torch.tensor([sign * draw(st.sampled_from(RATES)) for sign in signs])
    decay = decay.double() if dtype == torch.float64 else decay  # so that its gradient has the range of the values
    theta = torch.tensor([draw(st.sampled_from(ANGLES)) for _ in kinds]).to(decay)
    dilation = tuple(draw(st.sampled_from((1, 1, 2, 5, 40, 1000))) for _ in kinds)
    causal = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    value = torch.rand(B, -(-len(kinds) // groups), S, D, dtype=torch.float64, generator=generator) * 2 - 1
    limits = torch.finfo(dtype)
    if size == "subnormal":
        value = value * limits.tiny / 2
    elif size == "largest":  # a sum stays in the range of the dtype it is computed in, float32 for float16
        most = limits.max**0.5 if dtype == torch.float64 else limits.max
        value = value * most / (1 if dtype == torch.float16 else 2 * S)
    value = value.to(dtype)
    weights = torch.randn(B, len(kinds), T, D, dtype=torch.float64, generator=generator)
    if size == "largest" and dtype != torch.float16:
        weights = weights / max(B * D * T * S, 1) / 16  # so that gradients of the rates stay in range

    mask, masks, visible = draw(st.sampled_from(MASKS)), {}, torch.ones(B, 1, T, S, dtype=torch.bool)
    if mask in ("padding", "all padding", "NaN in padding"):
        keys = torch.rand(B, S, generator=generator) < (0.0 if mask == "all padding" else 0.6)
        masks, visible = {"key_mask": keys}, visible & keys[:, None, None]
        if mask == "NaN in padding":
            value = torch.where(keys[:, None, :, None], value, math.nan)
    elif mask in ("single tokens", "documents"):
        ends = torch.rand(B, S, generator=generator) < (2.0 if mask == "single tokens" else 0.3)
        numbers = ends.cumsum(1)
        masks, visible = {"documents": numbers}, (numbers[:, S - T :, None] == numbers[:, None])[:, None]
    elif mask in ("window of 1", "window"):
        lags = (S - T + torch.arange(T))[:, None] - torch.arange(S)
        masks = {"window": 1 if mask == "window of 1" else 4}
        visible = visible & (lags.abs() < masks["window"])
    elif mask == "any":
        visible = torch.rand(B, 1, T, S, generator=generator) < 0.5
        masks = {"visible": visible}
    keywords = {"query_length": T, "causal": causal, "groups": groups, **masks}
    return (value, kinds, decay, theta, dilation), keywords, visible, weights


MASKS = (
    "none",
    "padding",
    "all padding",
    "NaN in padding",
    "single tokens",
    "documents",
    "window of 1",
    "window",
    "any",
)


def differentiated(positional, keywords, weights):
    """P V by `rem_product`, and its gradients of V, rates and angles."""
    value, kinds, decay, theta, dilation = positional
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (value, decay, theta)]
    output = rem_product(leaves[0], kinds, *leaves[1:], dilation, **keywords)
    weights = weights.to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights, allow_unused=True, materialize_grads=True)]


def looped(positional, keywords, visible, weights, magnitudes=False):
    """The same in float64 by a double loop, or the same of the magnitudes of all terms."""
    value, kinds, decay, theta, dilation = positional
    value, decay = torch.nan_to_num(value.double(), nan=0.0), decay.double()
    if magnitudes:
        value, decay, weights, kinds = value.abs(), decay.abs(), weights.abs(), ("regular",) * len(kinds)
    theta = torch.tensor([first_turn(angle) for angle in theta.tolist()], dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (value, decay, theta)]
    keys = leaves[0].repeat_interleave(keywords["groups"], 1)[:, : len(kinds)]
    T, S = keywords["query_length"], value.shape[2]
    output = double_loop(keys, kinds, *leaves[1:], dilation, T, S - T, keywords["causal"], visible)
    output = output + 0 * sum(leaf.sum() for leaf in leaves)  # so that each has a gradient
    found = [output.detach(), *torch.autograd.grad(output, leaves, weights)]
    if magnitudes:
        found[3] = found[2]  # |∂/∂θ| ≤ Σ τ |ρ|^τ |v| = |∂/∂ρ|
    return found


def first_turn(angle):
    """The angle modulo 2π, with as many digits of π as it takes."""
    with mpmath.workdps(80):
        return float(mpmath.fmod(mpmath.mpf(angle), 2 * mpmath.pi))


def require_right(problem, roundings=64, floor=0.0):
    """Check `rem_product`, where `roundings` are those of the working dtype, `floor` the error allowed in a weight."""
    positional, keywords, _, weights = problem
    value = positional[0]
    limits = torch.finfo(torch.float64 if value.dtype == torch.float64 else torch.float32)
    found = differentiated(positional, keywords, weights)
    exact, sizes = (looped(*problem, magnitudes=magnitudes) for magnitudes in (False, True))
    cut = limits.tiny / limits.eps + floor  # weights that are nearly subnormal count as 0
    values, given = (float(x.nan_to_num().double().abs().sum()) for x in (value, weights))
    steps = value.shape[2] ** 2
    spacing = limits.tiny * limits.eps * (1 + steps * value.numel())  # of subnormal numbers
    least = [cut * size + spacing for size in (values, given, steps * values * given, steps * values * given)]
    for name, mine, right, size, small in zip(("P V", *GRADIENTS), found, exact, sizes, least, strict=True):
        assert mine.shape == right.shape, name
        assert bool(mine.isfinite().all()), f"{name} is not finite"
        stored = torch.finfo(mine.dtype)
        allowed = roundings * limits.eps * size + small + stored.eps * right.abs() + stored.tiny * stored.eps
        off = (mine.double() - right).abs() / allowed
        assert off.numel() == 0 or float(off.max()) <= 1, (
            f"{name} is off by {float(off.max()):.3g} times what is allowed"
        )


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_extreme_values_rates_angles_and_masks(backend, monkeypatch):
    monkeypatch.setenv("RSA_HF_BACKEND", backend)
    tried, dtypes, accuracy = Counter(), DTYPES, lambda dtype: {}
    if backend == "triton":
        pytest.importorskip("triton")
        from ops.kernels_under_test import use_small_chunks

        use_small_chunks(monkeypatch)
        dtypes = (torch.float32, torch.bfloat16, torch.float16)

        def accuracy(dtype):
            # For 16-bit values a weight is the sum of two 16-bit numbers. float16 has none below 2^-24.
            return {} if dtype == torch.float32 else {"roundings": 1024, "floor": 2.0**-23}

    @some(EXAMPLES // 4 if backend == "triton" else EXAMPLES)  # they are interpreted
    @given(problem=problems(dtypes))
    def test(problem):
        require_right(problem, **accuracy(problem[0][0].dtype))
        tried["right"] += 1

    test()
    note(Part.NUMBERS, f"P V of extreme values, rates, angles, dilations and masks: {backend}", tried)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("B", "S"), [(0, 40), (2, 0), (0, 0)])
@pytest.mark.parametrize("mask", ["", "key_mask", "documents", "window", "visible"])
def test_empty_values_give_empty_outputs_and_zero_gradients(backend, B, S, mask, monkeypatch):
    monkeypatch.setenv("RSA_HF_BACKEND", backend)
    masks = {"key_mask": torch.ones(B, S, dtype=torch.bool), "documents": torch.arange(S).expand(B, -1), "window": 2}
    masks["visible"] = torch.ones(B, 1, S, S, dtype=torch.bool)
    value, decay = torch.ones(B, 2, S, 3, requires_grad=True), torch.tensor([0.9, 0.8], requires_grad=True)
    output = rem_product(value, ("regular", "cos"), decay, 1.0, (1, 3), **{mask: masks[mask]} if mask else {})
    output.sum().backward()
    assert output.shape == value.grad.shape == (B, 2, S, 3)
    assert torch.equal(decay.grad, torch.zeros(2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_shared_values_are_rounded_once(backend, dtype, monkeypatch):
    """The gradient from each head is out of the range of float16. Their sum is not."""
    monkeypatch.setenv("RSA_HF_BACKEND", backend)
    T, large = 40, 60_000.0
    value = torch.zeros(1, 1, T, 2, dtype=dtype)
    weights = torch.tensor([large, -large])[None, :, None, None].expand(1, 2, T, 2)
    positional = value, ("regular",) * 2, torch.tensor([0.9, 0.9]), torch.zeros(2), (1, 2)
    keywords = {"query_length": T, "causal": True, "groups": 2}
    found = differentiated(positional, keywords, weights)[1]
    exact = looped(positional, keywords, None, weights.double())[1]
    fits = exact.abs() < torch.finfo(dtype).max
    off = (found.double() - exact).abs() - torch.finfo(dtype).eps * exact.abs()
    assert float(off[fits].max()) <= 1e-5 * large * T  # false for NaN


# --- long texts ----------------------------------------------------------------------------------------------------

LONG = 20_000
HEADS = [
    *[("regular", rate, 0.0, 1) for rate in (NEAR_ONE, -NEAR_ONE, 1.0, -1.0, 1 - 1e-4)],
    *[(kind, rate, angle, d) for kind in ("cos", "sin") for rate, angle, d in ((NEAR_ONE, 0.3, 1), (1.0, 1e9, 7))],
    ("regular", NEAR_ONE, 0.0, 13),
]


def filtered(v, kind, rate, angle, d, weights):
    """y = P v for z = rate·e^{iθ}, i.e. y_t = z (y_{t−d} + v_{t−d}), and its gradients, [T], (), ()."""
    turn = 1.0 if kind == "regular" else cmath.exp(1j * angle)
    read = (lambda x: x.imag) if kind == "sin" else (lambda x: x.real)
    z = complex(rate) * turn

    def by_residue(numerator, denominator, x):
        out = torch.zeros(len(x), dtype=torch.complex128)
        for i in range(d):
            out[i::d] = torch.from_numpy(lfilter(numerator, denominator, x[i::d].numpy().astype(complex)))
        return out

    y = by_residue([0, z], [1, -z], v)
    back = by_residue([0, z], [1, -z], weights.flip(0)).flip(0)
    slope = by_residue([0, 1], [1, -2 * z, z * z], v)  # ∂y/∂z = Σ k z^{k−1} v_{t−k}
    return [read(y), read(back), (read(slope * turn) * weights).sum(), (read(slope * 1j * z) * weights).sum()]


@pytest.mark.parametrize("backend", ["", "chunked"])  # the default is C++ where there is a compiler
@pytest.mark.parametrize(
    ("dtype", "is_broken"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_long_texts_agree_with_a_digital_filter(dtype, is_broken, backend, monkeypatch):
    monkeypatch.setenv("RSA_HF_BACKEND", backend)
    kinds, rates, angles, dilation = zip(*HEADS, strict=True)
    rates, angles = torch.tensor(rates), torch.tensor(angles)
    value, weights = torch.randn(2, 1, len(HEADS), LONG, 1, generator=torch.Generator().manual_seed(0))
    value = value.to(dtype)
    # The broken variant rounds the rates to 16 bits.
    used = rates.bfloat16().float() if is_broken else rates
    output, *gradients = differentiated((value, kinds, used, angles, dilation), {}, weights)
    worst = 0.0
    for h, (kind, _, _, d) in enumerate(HEADS):
        # The float32 numbers, which are not exactly those above.
        rate, angle = rates[h].item(), angles[h].item()
        v, w = value[0, h, :, 0].double(), weights[0, h, :, 0].double()
        right = filtered(v, kind, rate, angle, d, w)
        sizes = filtered(v.abs(), "regular", abs(rate), 0.0, d, w.abs())
        sizes[3] = sizes[2]
        found = [output[0, h, :, 0], gradients[0][0, h, :, 0], gradients[1][h], gradients[2][h]]
        for mine, exact, size in zip(found, right, sizes, strict=True):
            allowed = 64 * torch.finfo(torch.float32).eps * size + torch.finfo(mine.dtype).eps * exact.abs() + 1e-30
            worst = max(worst, float(((mine.double() - exact).abs() / allowed).nan_to_num(math.inf).max()))
    assert (worst > 1) is is_broken
    kind = f"P V of {LONG:,} positions in {dtype}, rates up to 1{', rounded' * is_broken}: {backend or 'default'}"
    note(Part.NUMBERS, kind, {"largest error / allowed": worst})


# --- layers --------------------------------------------------------------------------------------------------------

H, SCALE = 8, 20.0
LAYER = RSAConfig(
    num_regular=2, num_cyclical_pairs=1, num_dilated_regular=1, num_dilated_cyclical_pairs=1, dilation=[2, 3, 40]
)
LAYER_KINDS, LAYER_DILATION = ("regular", "regular", "cos", "sin", "regular", "cos", "sin"), (1, 1, 1, 1, 2, 3, 40)
STORED = {
    "mu": (1e4, -1e4, math.inf, -math.inf, 0.02, -0.15, 0.9, -4.0),  # σ(−80) is 2e-35, and float32 ends at 1e-38
    "eta": (1e4, -1e4, math.inf, -math.inf, math.atanh(NEAR_ONE) / SCALE, 0.48, 0.0, -0.05),
    "nu": (1e4, -1e4, math.inf, -math.inf, 16.1 / SCALE, 1.2, 0.0, 0.05),
    "theta": (0.0, math.pi / 80, 1e4, -1e9, 1e30),
}


def heads_of_a_layer(config, num_heads=H):
    sizes = {"n_embd": 2 * num_heads, "n_head": num_heads, "n_layer": 1, "n_positions": 8}
    return patch_model(GPT2Model(GPT2Config(**sizes)).eval(), config).h[0].attn.rsa


def equation_4(heads, attention, value, visible, causal, magnitudes=False):
    """Eq. 4 of the layer above in float64, with P V as a double loop, or the magnitude of all terms."""
    eta, nu, mu = (SCALE * getattr(heads, name).double() for name in ("eta", "nu", "mu"))
    lam, gamma, gate = torch.tanh(eta), torch.sigmoid(nu), torch.sigmoid(mu)
    decay = torch.stack([lam[0], lam[1], gamma[0], gamma[0], lam[2], gamma[1], gamma[1]])
    turns = SCALE * heads.theta.double()
    turns = turns - turns.detach() + torch.tensor([first_turn(turn) for turn in turns.tolist()], dtype=torch.float64)
    angle, kinds = (
        torch.stack([0 * turns[0], 0 * turns[0], turns[0], turns[0], 0 * turns[0], turns[1], turns[1]]),
        LAYER_KINDS,
    )
    attention, value, shut = attention.double(), value.double(), 1 - gate
    if magnitudes:
        attention, value, decay, kinds, shut = (
            attention.abs(),
            value.abs(),
            decay.abs(),
            ("regular",) * len(kinds),
            1 + gate,
        )
    R, T = len(kinds), attention.shape[1]
    keys = value.repeat_interleave(attention.shape[2] // value.shape[1], 1)[:, :R]
    product = double_loop(keys, kinds, decay, angle, LAYER_DILATION, T, value.shape[2] - T, causal, visible)
    product = product + 0 * (decay.sum() + angle.sum())  # so that each has a gradient
    return torch.cat([shut * attention[:, :, :R] + gate * product.transpose(1, 2), attention[:, :, R:]], 2)


def test_layers_with_saturated_infinite_and_huge_parameters():
    tried = Counter()
    heads = heads_of_a_layer(LAYER)

    @some(EXAMPLES)
    @given(data=st.data())
    def test(data):
        draw = data.draw
        with torch.no_grad():
            for name, choices in STORED.items():
                parameter = getattr(heads, name)
                parameter.copy_(torch.tensor([draw(st.sampled_from(choices)) for _ in range(len(parameter))]))
        T, B, dtype = (
            draw(st.sampled_from((1, 2, 9, 33))),
            draw(st.sampled_from((0, 1, 2))),
            draw(st.sampled_from(DTYPES)),
        )
        causal, size = draw(st.booleans()), draw(st.sampled_from(("one", "largest")))
        most = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 8 * T) if size == "largest" else 1.0
        generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
        attention, value = (
            ((torch.rand(B, *shape, 2, generator=generator, dtype=torch.float64) * 2 - 1) * most).to(dtype)
            for shape in ((T, H), (4, T))
        )
        inputs = [attention.clone().requires_grad_(), value.clone().requires_grad_()]
        output = heads(*inputs, AttentionMask(T, T, 0, causal))
        ((output.double() / (16 * most * T * T * max(B, 1))).sum()).backward()
        right, sizes = (equation_4(heads, attention, value, None, causal, m).detach() for m in (False, True))
        working = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        stored, fits = torch.finfo(dtype), right.abs() < torch.finfo(dtype).max * 0.99
        with torch.no_grad():  # a step of generation, which keeps its weights f(τ) for the next
            steps = [heads(attention[:, -1:], value, AttentionMask(1, T, T - 1, True)) for _ in range(2 * causal)]
        for found, last in [(output.detach(), T), *((step, 1) for step in steps)]:
            allowed = 128 * working * sizes + stored.eps * right.abs() + stored.tiny * stored.eps + 1e-30
            allowed = allowed + (2.0**-30 * sizes.amax() if last < T and sizes.numel() else 0)
            off = ((found.double() - right[:, -last:]).abs() / allowed[:, -last:])[fits[:, -last:]]
            assert off.numel() == 0 or float(off.max()) <= 1, float(off.max())  # false for NaN
        for tensor in (*inputs, *heads.parameters()):
            assert bool(tensor.grad.isfinite().all())
            tensor.grad = None
        tried["right, with finite gradients"] += 1

    test()
    note(Part.NUMBERS, "layers with saturated, infinite and huge stored parameters", tried)


@pytest.mark.parametrize("eta", [7.0, 8.4, 10.0, 14.0])
def test_a_rate_that_float32_cannot_tell_from_one_still_learns(eta):
    heads = heads_of_a_layer(RSAConfig(num_regular=1, parameter_scale=1, gate_init=0.0), 1)
    with torch.no_grad():
        heads.eta.fill_(eta)
    heads(torch.zeros(1, 300, 1, 1), torch.ones(1, 1, 300, 1), AttentionMask(300, 300, 0, True)).sum().backward()

    def slope(lam):
        return sum(k * lam ** (k - 1) for t in range(300) for k in range(1, t + 1)) / 2

    expected = slope(math.tanh(eta)) / math.cosh(eta) ** 2
    assert float(heads.eta.grad) == pytest.approx(expected, rel=1e-3)
    lam = torch.tensor(eta).tanh().item()  # the broken variant: the rate in float32
    assert eta < 8 or slope(lam) * (1 - lam**2) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mu", [-math.inf, -1e4])
def test_nothing_overflows_behind_a_shut_gate(dtype, mu):
    heads = heads_of_a_layer(RSAConfig(num_regular=2, num_cyclical_pairs=1), 4)
    with torch.no_grad():
        heads.mu.fill_(mu)
        heads.eta.fill_(1e4)
    most = torch.finfo(dtype).max
    value, attention = torch.full((1, 4, 40, 3), most, dtype=dtype), torch.full((1, 40, 4, 3), -most, dtype=dtype)
    for T in (40, 1):
        for with_gradients in (True, False):
            with torch.set_grad_enabled(with_gradients):
                mixed = heads(
                    attention[:, -T:], value.requires_grad_(with_gradients), AttentionMask(T, 40, 40 - T, True)
                )
            assert torch.equal(mixed, attention[:, -T:])
    value.requires_grad_()
    heads(attention, value, AttentionMask(40, 40, 0, True)).float().mean().backward()
    assert all(float(parameter.grad.abs().sum()) == 0 for parameter in heads.parameters())
