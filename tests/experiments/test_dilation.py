"""The dilation factor: autocorrelation and recurrence plots against double loops, known periods, noise, the series of the paper."""

import math
from itertools import pairwise

import pytest
import torch

from experiments import forecasting
from experiments.dilation import (
    autocorrelation,
    suggested_dilation,
    suggested_token_dilation,
    token_autocorrelation,
)
from experiments.forecasting.series import load_series


def loop_autocorrelation(series, max_lag):
    """Mean over the variables of Σ (x_t − x̄)(x_{t+τ} − x̄) / Σ (x_t − x̄)² of the differences, term by term."""
    found = [0.0] * (max_lag + 1)
    for variable in series.T.tolist():
        x = [b - a for a, b in pairwise(variable)]
        mean = sum(x) / len(x)
        total = sum((value - mean) ** 2 for value in x)
        for lag in range(max_lag + 1):
            products = sum((x[t] - mean) * (x[t + lag] - mean) for t in range(len(x) - lag))
            found[lag] += products / total / series.shape[1]
    return torch.tensor(found, dtype=torch.float64)


def test_autocorrelation_is_the_sum_over_pairs():
    series = torch.randn(61, 3).cumsum(0) + torch.tensor([0.0, 5.0, -100.0])
    for each in (series, torch.cat([series, torch.ones(61, 1)], dim=1)):  # a constant variable counts for nothing
        expected = loop_autocorrelation(series.double(), 20)
        torch.testing.assert_close(autocorrelation(each, 20), expected, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="not finite"):
        autocorrelation(torch.tensor([0.0, math.nan, 1.0]), 1)


def test_token_autocorrelation_is_that_of_one_hot_vectors():
    """But for the ends, over which the rate takes its mean and the autocorrelation does not."""
    tokens = torch.randint(5, (5000,))
    tokens[7:] = torch.where(torch.rand(4993) < 0.4, tokens[:-7], tokens[7:])
    hot = torch.nn.functional.one_hot(tokens, 5).double()
    hot -= hot.mean(0)
    expected = torch.stack([(hot[lag:] * hot[: 5000 - lag]).sum() for lag in range(21)]) / hot.square().sum()
    found = token_autocorrelation(tokens, 20)
    assert found[7] > 0.2 and found[0] == 1
    assert (found - expected).abs().max() < 0.01


def seasonal(period, length=2000, kept=0.9):
    x = torch.randn(length, 2)
    for t in range(period, length):
        x[t] = kept * x[t - period] + math.sqrt(1 - kept**2) * x[t]
    return x


@pytest.mark.parametrize("period", [2, 7, 24, 95])
def test_a_known_period_is_found(period):
    torch.manual_seed(period)
    t = torch.arange(2000)[:, None]
    assert suggested_dilation(seasonal(period)) == period
    trend = 0.01 * t + 3 * torch.sin(2 * math.pi * t / 1700)
    assert suggested_dilation(seasonal(period) + trend) == period


def test_noise_on_a_slow_wave_does_not_hide_its_period():
    """Differences have more of the noise and less of the wave, so that lag 1 is negative and lag 2 is not."""
    torch.manual_seed(0)
    t = torch.arange(24.0 * 30)
    found = [suggested_dilation(torch.sin(2 * math.pi * t / 24) + 0.1 * torch.randn(len(t))) for _ in range(8)]
    assert found.count(24) >= 7 and set(found) <= {23, 24, 25}


@pytest.mark.parametrize("walk", [False, True])
def test_noise_suggests_nothing(walk):
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(1000, 1, generator=generator) for _ in range(40)]
    assert [suggested_dilation(x.cumsum(0) if walk else x) for x in noise].count(None) >= 39


def test_tokens_with_a_period_and_without():
    torch.manual_seed(0)
    columns = torch.randint(20, (30,)).repeat(60)
    noisy = torch.where(torch.rand(1800) < 0.4, torch.randint(20, (1800,)), columns)
    assert suggested_token_dilation(noisy) == 30
    assert suggested_token_dilation(noisy[torch.randperm(1800)]) is None


@pytest.mark.parametrize("name", ["ETTh1", "ETTh2", "ETTm1", "WTH"])
def test_a_series_of_the_paper_suggests_a_day(name, data_folder, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    series = load_series(name)
    for piece in (values := series.values[: series.part("train").stop], *values.chunk(2)):
        assert suggested_dilation(piece) == forecasting.DILATION[name]
