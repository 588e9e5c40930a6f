"""P V of 20,000 positions and rates up to 1, against the recurrence as a digital filter in float64."""

import cmath

import pytest
import torch
from scipy.signal import lfilter

from reliability.extremes import NEAR_ONE
from reliability.record import Part, note
from rsa_hf import rem_product

T = 20_000
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

    def by_residue(function, x):
        out = torch.zeros(len(x), dtype=torch.complex128)
        for i in range(d):
            out[i::d] = torch.from_numpy(function(x[i::d].numpy().astype(complex)))
        return out

    y = by_residue(lambda x: lfilter([0, z], [1, -z], x), v)
    slope = by_residue(lambda x: lfilter([0, 1], [1, -2 * z, z * z], x), v)  # ∂y/∂z = Σ k z^{k−1} v_{t−k}
    back = by_residue(lambda x: lfilter([0, z], [1, -z], x), weights.flip(0)).flip(0)
    drate, dtheta = slope * turn, slope * 1j * z
    return [read(y), read(back), (read(drate) * weights).sum(), (read(dtheta) * weights).sum()]


@pytest.mark.parametrize("backend", ["", "pytorch"])  # the default is C++ where there is a compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_texts_agree_with_a_digital_filter(dtype, backend, monkeypatch):
    monkeypatch.setenv("RSA_HF_BACKEND", backend)
    kinds, rates, angles, dilation = zip(*HEADS, strict=True)
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1, len(HEADS), T, 1, generator=generator).to(dtype)
    weights = torch.randn(1, len(HEADS), T, 1, generator=generator)
    leaves = [value.requires_grad_(), *(torch.tensor(x, requires_grad=True) for x in (rates, angles))]
    output = rem_product(leaves[0], kinds, *leaves[1:], dilation)
    gradients = torch.autograd.grad(output, leaves, weights)
    worst = 0.0
    for h, (kind, rate, angle, d) in enumerate(HEADS):
        # The float32 numbers, which are not exactly those above.
        rate, angle = leaves[1][h].item(), leaves[2][h].item()
        v, w = value[0, h, :, 0].detach().double(), weights[0, h, :, 0].double()
        right = filtered(v, kind, rate, angle, d, w)
        sizes = filtered(v.abs(), "regular", abs(rate), 0.0, d, w.abs())
        sizes[3] = sizes[2]
        found = [output[0, h, :, 0].detach(), gradients[0][0, h, :, 0], gradients[1][h], gradients[2][h]]
        for mine, exact, size in zip(found, right, sizes, strict=True):
            assert bool(mine.isfinite().all())
            allowed = 64 * torch.finfo(torch.float32).eps * size + torch.finfo(mine.dtype).eps * exact.abs() + 1e-30
            worst = max(worst, float(((mine.double() - exact).abs() / allowed).max()))
    assert worst <= 1
    where = "in plain PyTorch" if backend else "by default"
    note(
        Part.NUMBERS, f"P V of {T:,} positions in {dtype}, rates up to 1, {where}", {"largest error / allowed": worst}
    )
