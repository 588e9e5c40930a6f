"""P V of extreme numbers is finite, and as exact as a double loop in float64 allows.

The double loop runs twice. The second run sums magnitudes (|λ|, |v|, and 1 for cosines). The error allowed is a few
roundings of that sum, whatever cancels in the result.
"""

import math

import mpmath
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from references import double_loop, visible_keys
from reliability.trials import is_full
from rsa_hf import rem_product

EXAMPLES = 80 if is_full() else 12
NEAR_ONE = 1 - 1e-7
RATES = (NEAR_ONE, 1.0, 0.0, 1e-30, 1e-38, 0.5, 0.93)
ANGLES = (0.0, math.pi, 1e-30, 2.0, -1e4, 1e9, 1e30)
LENGTHS = (1, 2, 3, 7, 16, 17, 33, 35)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = ("one", "largest", "subnormal")
PADDING, PACKING = ("padding", "all padding", "NaN in padding"), ("single tokens", "documents")
MASKS = ("none", *PADDING, *PACKING, "window of 1", "window", "any")
GRADIENTS = ("dV", "d decay", "d theta")


@st.composite
def problems(draw, dtypes=DTYPES, sizes=SIZES, beyond=0):
    """The arguments of `rem_product` as (positional, keywords), which keys each query sees, and weights of a loss."""
    T = draw(st.sampled_from(LENGTHS))
    S = T + draw(st.sampled_from((0, 0, 1, 19)))
    B, D, groups = draw(st.sampled_from((0, 1, 2))), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    dtype, size = draw(st.sampled_from(dtypes)), draw(st.sampled_from(sizes))
    kinds = tuple(draw(st.lists(st.sampled_from(("regular", "cos", "sin")), min_size=1, max_size=3))) * groups
    signs = [draw(st.sampled_from((-1, 1))) if kind == "regular" else 1 for kind in kinds]
    decay = torch.tensor([sign * draw(st.sampled_from(RATES)) for sign in signs])
    decay = decay.double() if dtype == torch.float64 else decay  # so that its gradient has the range of the values
    theta = torch.tensor([draw(st.sampled_from(ANGLES)) for _ in kinds]).to(decay)
    dilation = tuple(draw(st.sampled_from((1, 1, 2, 5, 40, 1000))) for _ in kinds)
    causal = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    value = torch.rand(B, len(kinds) // groups, S, D, dtype=torch.float64, generator=generator) * 2 - 1
    limits = torch.finfo(dtype)
    if size == "subnormal":
        value = value * limits.tiny / 2
    elif size == "largest":  # Σ τ |v|, to `beyond` steps, stays in the range of its working dtype, float32 for float16
        most = limits.max**0.5 if dtype == torch.float64 else limits.max
        value = value * most / (1 if dtype == torch.float16 else (S + beyond) ** 2)
    value = value.to(dtype)
    weights = torch.randn(B, len(kinds), T, D, dtype=torch.float64, generator=generator)
    if size == "largest" and dtype != torch.float16:
        weights = weights / max(B * D * T * S, 1) / 16  # so that gradients of the rates stay in range

    mask, masks = draw(st.sampled_from(MASKS)), {}
    if mask in PADDING:
        keys = torch.rand(B, S, generator=generator) < (0.0 if mask == "all padding" else 0.6)
        masks = {"key_mask": keys}
        if mask == "NaN in padding":
            value = torch.where(keys[:, None, :, None], value, math.nan)
    elif mask in PACKING:
        ends = torch.rand(B, S, generator=generator) < (2.0 if mask == "single tokens" else 0.3)
        masks = {"documents": ends.cumsum(1)}
    elif mask in ("window of 1", "window"):
        masks = {"sliding_window": 1 if mask == "window of 1" else 4}
    visible = visible_keys(T, S, causal=causal, **masks)
    if mask == "any":
        visible = torch.rand(B, 1, T, S, generator=generator) < 0.5
        masks = {"visible": visible}
    keywords = {"query_length": T, "causal": causal, "num_key_value_groups": groups, **masks}
    return (value, kinds, decay, theta, dilation), keywords, visible, weights


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
    keys = leaves[0].repeat_interleave(keywords["num_key_value_groups"], 1)
    where = {"query_length": keywords["query_length"], "causal": keywords["causal"], "visible": visible}
    output = double_loop(keys, kinds, *leaves[1:], dilation, **where)
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
    least = [cut * values + limits.tiny, cut * given + limits.tiny]  # sums that are subnormal may count as 0
    least += 2 * [cut * steps * values * given + limits.tiny * steps * (1 + given) * value.numel()]
    for name, mine, right, size, small in zip(("P V", *GRADIENTS), found, exact, sizes, least, strict=True):
        assert mine.shape == right.shape, name
        assert bool(mine.isfinite().all()), f"{name} is not finite"
        stored = torch.finfo(mine.dtype)
        allowed = roundings * limits.eps * size + small + stored.eps * right.abs() + stored.tiny * stored.eps
        off = (mine.double() - right).abs() / allowed
        assert off.numel() == 0 or float(off.max()) <= 1, f"{name}: {float(off.max()):.3g} times the error allowed"


def test_extreme_values_rates_angles_and_masks(backend):
    options = (DTYPES, SIZES)
    if backend == "triton":  # sums run to the end of a chunk of up to 64 steps, and subnormal numbers may count as 0
        options = ((torch.float32, torch.bfloat16, torch.float16), SIZES[:2], 64)

    @settings(max_examples=EXAMPLES if backend != "triton" else EXAMPLES // 4, phases=(Phase.explicit, Phase.generate))
    @given(problem=problems(*options))
    def test(problem):
        # For 16-bit values the kernels split a weight into two 16-bit numbers. float16 has none below 2^-24.
        is_split = backend == "triton" and problem[0][0].dtype != torch.float32
        require_right(problem, **({"roundings": 1024, "floor": 2.0**-23} if is_split else {}))

    test()


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_shared_values_are_rounded_once(dtype):
    """The gradient from each head is out of the range of float16. Their sum is not."""
    T, large = 40, 60_000.0
    value = torch.zeros(1, 1, T, 2, dtype=dtype)
    weights = torch.tensor([large, -large])[None, :, None, None].expand(1, 2, T, 2)
    positional = value, ("regular",) * 2, torch.tensor([0.9, 0.9]), torch.zeros(2), (1, 2)
    keywords = {"query_length": T, "causal": True, "num_key_value_groups": 2}
    found = differentiated(positional, keywords, weights)[1]
    exact = looped(positional, keywords, None, weights.double())[1]
    fits = exact.abs() < torch.finfo(dtype).max
    off = (found.double() - exact).abs() - torch.finfo(dtype).eps * exact.abs()
    assert float(off[fits].max()) <= 1e-5 * large * T  # false for NaN


LONG = 20_000
HEADS = [
    *[("regular", rate, 0.0, 1) for rate in (NEAR_ONE, -NEAR_ONE, 1.0, -1.0, 1 - 1e-4)],
    *[(kind, rate, angle, d) for kind in ("cos", "sin") for rate, angle, d in ((NEAR_ONE, 0.3, 1), (1.0, 1e9, 7))],
    ("regular", NEAR_ONE, 0.0, 13),
]


@pytest.mark.parametrize("backend", ["", "pytorch"])  # the default is C++ where there is a compiler
@pytest.mark.parametrize(
    ("dtype", "is_broken"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_long_texts_in_float32_agree_with_float64(dtype, is_broken, backend, monkeypatch):
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", backend)
    kinds, rates, angles, dilation = zip(*HEADS, strict=True)
    rates, angles = torch.tensor(rates), torch.tensor(angles)
    value, weights = torch.randn(2, 1, len(HEADS), LONG, 1, generator=torch.Generator().manual_seed(0))
    value = value.to(dtype)
    # The broken variant rounds the rates to 16 bits.
    used = rates.bfloat16().float() if is_broken else rates
    found = differentiated((value, kinds, used, angles, dilation), {}, weights)
    v, rates, angles, w = (x.double() for x in (value, rates, angles, weights))
    exact = differentiated((v, kinds, rates, angles, dilation), {}, w)
    sizes = differentiated((v.abs(), ("regular",) * len(HEADS), rates.abs(), angles, dilation), {}, w.abs())
    sizes[3] = sizes[2]
    worst = 0.0
    for mine, right, size in zip(found, exact, sizes, strict=True):
        allowed = 64 * torch.finfo(torch.float32).eps * size + torch.finfo(mine.dtype).eps * right.abs() + 1e-30
        worst = max(worst, float(((mine.double() - right).abs() / allowed).nan_to_num(math.inf).max()))
    assert (worst > 1) is is_broken
