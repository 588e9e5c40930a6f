"""The report shows the effective gates and rates."""

import math

import pytest
import torch

from families import FULL_PLAN, build, move_rates
from rsa_hf import HeadConfig, RSAConfig, patch_model, rsa_report


def test_the_report_shows_the_effective_rates():
    model = patch_model(build("gpt2"), FULL_PLAN)
    report = rsa_report(model)
    assert [layer.module for layer in report.layers] == ["h.0.attn", "h.1.attn"]
    heads = report.layers[0].heads
    rates = model.h[0].attn.rsa.rates()
    assert [h.kind for h in heads] == ["regular", "cos", "sin", "regular", "cos", "sin"]
    assert [h.dilation for h in heads] == [1, 1, 1, 2, 3, 5]
    assert [h.theta is None for h in heads] == [True, False, False, True, False, False]
    lam, gamma = rates["lam"].tolist(), rates["gamma"].tolist()
    assert [h.decay for h in heads] == pytest.approx([lam[0], gamma[0], gamma[0], lam[1], gamma[1], gamma[1]])
    assert heads[5].gate == pytest.approx(1 / (1 + math.exp(-0.5)))
    for head in heads:
        assert abs(head.decay) ** (head.half_life / head.dilation) == pytest.approx(0.5)
    assert str(report).count("h.0.attn") == 6
    assert report.num_parameters == 2 * (1 + 2 + 2 + 2)


@torch.no_grad()
def test_the_report_shows_where_gates_and_rates_started():
    model = patch_model(build("gpt2"), FULL_PLAN)
    before = rsa_report(model).layers[0].heads
    for parameter in model.h[0].attn.rsa.parameters():
        parameter += 0.02
    for old, new in zip(before, rsa_report(model).layers[0].heads, strict=True):
        start = (new.gate_start, new.decay_start, new.theta_start)
        assert start == (old.gate, old.decay, old.theta) == (old.gate_start, old.decay_start, old.theta_start)
        assert new.gate > new.gate_start and new.decay > new.decay_start
        assert new.kind == "regular" or new.theta > new.theta_start


def test_the_report_shows_the_free_lags():
    heads = [HeadConfig(0, 0, "regular", 0.0, 0.5, free_lags=(1.0, 0.0)), HeadConfig(0, 3, "sin", 0.8, 0.4, theta=0.7)]
    model = move_rates(patch_model(build("llama"), RSAConfig(heads=heads, num_free_lags=2)))
    report = rsa_report(model)
    [[regular, sin]] = [layer.heads for layer in report.layers]
    assert regular.free_lags == pytest.approx((1.0, 0.0), abs=0.1)
    assert [*regular.free_lags, *sin.free_lags] == model.layers[0].self_attn.rsa.free_lags.tolist()
    assert " ".join(f"{weight:+.4f}" for weight in sin.free_lags) in str(report)
    assert "free lags" not in str(rsa_report(patch_model(build("llama"), FULL_PLAN)))
