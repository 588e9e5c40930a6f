"""The dilating factor: autocorrelation and recurrence plots against double loops, known periods, and noise."""

import math
from itertools import pairwise

import pytest
import torch

from experiments.theory.dilation import (
    autocorrelation,
    recurrence_plot,
    recurrence_rate,
    suggested_dilation,
    suggested_token_dilation,
    token_autocorrelation,
)


def loop_autocorrelation(series, max_lag, differenced):
    """Mean over the variables of Σ (x_t − x̄)(x_{t+τ} − x̄) / Σ (x_t − x̄)², term by term."""
    found = [0.0] * (max_lag + 1)
    for variable in series.T.tolist():
        x = [b - a for a, b in pairwise(variable)] if differenced else variable
        mean = sum(x) / len(x)
        total = sum((value - mean) ** 2 for value in x)
        for lag in range(max_lag + 1):
            products = sum((x[t] - mean) * (x[t + lag] - mean) for t in range(len(x) - lag))
            found[lag] += products / total / series.shape[1]
    return torch.tensor(found, dtype=torch.float64)


def loop_recurrence_rate(tokens, max_lag, line):
    """Diagonal by diagonal of the plot: the points of all runs that are long enough."""
    plot, found = recurrence_plot(tokens), []
    for lag in range(max_lag + 1):
        points = run = 0
        for t in range(lag, len(tokens)):
            run = run + 1 if plot[t, t - lag] else 0
            if run >= line:
                points += line if run == line else 1
        found.append(points / (len(tokens) - lag))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("differenced", [True, False])
def test_autocorrelation_is_the_sum_over_pairs(differenced):
    series = torch.randn(61, 3).cumsum(0) + torch.tensor([0.0, 5.0, -100.0])
    expected = loop_autocorrelation(series.double(), 20, differenced)
    torch.testing.assert_close(autocorrelation(series, 20, differenced=differenced), expected, rtol=0, atol=1e-9)
    wrapped = torch.fft.irfft(torch.fft.rfft(series.double() - series.double().mean(0), dim=0).abs() ** 2, n=61, dim=0)
    assert (wrapped / wrapped[0]).mean(1)[:21].sub(expected).abs().max() > 0.01  # the end would meet the beginning
    one = series[:, 0]
    torch.testing.assert_close(autocorrelation(one, 20), autocorrelation(one[:, None], 20))


@pytest.mark.parametrize("line", [1, 2, 3, 5])
def test_recurrence_rate_is_the_share_of_each_diagonal(line):
    tokens = torch.randint(2, (67,))
    torch.testing.assert_close(recurrence_rate(tokens, 30, line), loop_recurrence_rate(tokens, 30, line))
    assert loop_recurrence_rate(tokens, 30, 1).sub(loop_recurrence_rate(tokens, 30, 5)).abs().max() > 0.1


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


def seasonal(period, length=2000, kept=0.9, variables=2):
    x = torch.randn(length, variables)
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


@pytest.mark.parametrize("period", [12, 24, 50])
def test_the_period_and_not_its_multiples(period):
    torch.manual_seed(0)
    t = torch.arange(3000.0)
    wave = torch.sin(2 * math.pi * t / period) + 0.03 * torch.randn(3000)
    assert suggested_dilation(wave, 400) == pytest.approx(period, abs=1)
    # Every second period is more alike than every one.
    bump = torch.exp(-((8 * (torch.arange(period) / period - 0.5)) ** 2))
    alternating = torch.cat([bump, 0.5 * bump]).repeat(1 + 3000 // (2 * period))
    r = autocorrelation(alternating, 4 * period + 1)
    assert r[2 * period] > r[period] + 0.1
    assert suggested_dilation(alternating + 0.02 * torch.randn(len(alternating)), 4 * period + 1) == period


@pytest.mark.parametrize(("days", "size"), [(30, 0.1), (100, 0.3), (365, 0.3), (365, 0.5)])
def test_noise_on_a_slow_wave_does_not_hide_its_period(days, size):
    """Differences have more of the noise and less of the wave, so that lag 1 is negative and lag 2 is not."""
    torch.manual_seed(0)
    t = torch.arange(24.0 * days)
    waves = [torch.sin(2 * math.pi * t / 24) + size * torch.randn(len(t)) for _ in range(8)]
    assert size < 0.2 or all(autocorrelation(wave, 2)[1] < 0 < autocorrelation(wave, 2)[2] for wave in waves)
    found = [suggested_dilation(wave) for wave in waves]
    assert found.count(24) >= 7 and set(found) <= {23, 24, 25}


@pytest.mark.parametrize("kept", [0.4, 0.7])
@pytest.mark.parametrize("period", [2, 7, 24])
def test_a_period_that_is_soon_forgotten_is_found(period, kept):
    torch.manual_seed(period)
    assert [suggested_dilation(seasonal(period, kept=kept)) for _ in range(4)] == [period] * 4


def noise(kind, generator):
    x = torch.randn(1000, 1, generator=generator)
    if kind == "walk":
        return x.cumsum(0)
    if kind == "autoregressive":
        fading = 0.9 ** torch.arange(100.0).flip(0)
        return torch.nn.functional.conv1d(x.T, fading[None, None])[0][:, None]
    return x


@pytest.mark.parametrize("kind", ["white", "walk", "autoregressive"])
def test_noise_suggests_nothing(kind):
    generator = torch.Generator().manual_seed(0)
    found = [suggested_dilation(noise(kind, generator)) for _ in range(40)]
    assert found.count(None) >= 39


def test_without_differences_a_walk_would_look_periodic():
    """Why differences are taken: autocorrelations of a trend are large everywhere."""
    x = seasonal(24)[:, :1] + 0.02 * torch.arange(2000)[:, None]
    assert autocorrelation(x, 100, differenced=False)[1:].min() > 0.5
    assert autocorrelation(x, 100)[1:].min() < 0


def test_a_peak_that_is_further_out_is_not_guessed():
    torch.manual_seed(0)
    x = torch.sin(2 * math.pi * torch.arange(2000.0) / 100) + 0.05 * torch.randn(2000)
    smooth = torch.nn.functional.avg_pool1d(x[None], 9, 1)[0]
    assert suggested_dilation(smooth, 90) is None
    assert suggested_dilation(smooth, 150) == pytest.approx(100, abs=1)


def test_tokens_with_a_period_and_without():
    torch.manual_seed(0)
    columns = torch.randint(20, (30,)).repeat(60)
    noisy = torch.where(torch.rand(1800) < 0.4, torch.randint(20, (1800,)), columns)
    assert suggested_token_dilation(noisy) == 30
    assert suggested_token_dilation(torch.randint(20, (1800,))) is None
    shuffled = noisy[torch.randperm(1800)]
    assert suggested_token_dilation(shuffled) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autocorrelation(torch.tensor([0.0, math.nan, 1.0]), 1), "not finite"),
        (
            lambda: autocorrelation(torch.stack([torch.randn(9), torch.full((9,), 0.1)], 1), 2),
            "variable 1 of 2 is constant",
        ),
        (lambda: autocorrelation(torch.arange(9.0) * 0.1, 2), "variable 0 of 1 is constant after differencing"),
        (lambda: autocorrelation(torch.randn(9), 8), "from 1 to 7"),
        (lambda: recurrence_rate(torch.arange(9), 0), "from 1 to 8"),
    ],
)
def test_what_does_not_fit_is_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()
