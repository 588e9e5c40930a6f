r"""The dilation factor d, from autocorrelation of series and recurrence plots of text and code (paper, section 3).

A dilated head reaches back d, 2d, 3d, … steps, so d should be the period of the data. In a series that is a peak of
the autocorrelation; in tokens it is a diagonal of the recurrence plot, R[t, s] = 1 where token t equals token s
(Webber et al., 2016), with more points than others. Both are the same measure: with tokens as one-hot vectors, the
share of points on diagonal τ above chance is an autocorrelation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

LONGEST = 512
# A peak counts if it is at least this share of the highest: among a period and its multiples, the first is the period.
SHARE = 0.5
# A period repeats: the mean at 2d, 3d and 4d is at least this share of the peak.
AGAIN, TIMES = 0.1, 4
# Required height in standard errors. The highest of 512 lags of white noise is about 3 above 0.
ERRORS = 5.0
FLOOR = 0.05  # minimum height of the highest peak


def autocorrelation(series: Tensor, max_lag: int) -> Tensor:
    """Autocorrelation of the differences of a series, r_τ = Σ_t (x_t − x̄)(x_{t+τ} − x̄) / Σ_t (x_t − x̄)².

    A trend or a slow wave would make all autocorrelations of the series itself large and move the peaks. From [T] or
    [T, N] to r_0 … r_max_lag, [max_lag + 1], float64, averaged over the variables that are not constant.
    """
    x = series.detach().double().reshape(len(series), -1)
    if not bool(x.isfinite().all()):
        raise ValueError("series has entries that are not finite. Fill the gaps first.")
    x = x.diff(dim=0)
    x = x - x.mean(0)
    # Padded, so that the end of the series does not wrap to its beginning.
    spectrum = torch.fft.rfft(x, n=2 * len(x), dim=0).abs().square()
    products = torch.fft.irfft(spectrum, dim=0)[: max_lag + 1]
    found: Tensor = (products / x.square().sum(0)).nanmean(1)
    return found


def token_autocorrelation(tokens: Tensor, max_lag: int) -> Tensor:
    """Autocorrelation of tokens [T] as one-hot vectors: the recurrence rate above chance, at most 1.

    It is (rate − chance) / (1 − chance): rate is the share of recurrent points on diagonal τ of the recurrence plot,
    chance Σ p² over the tokens' frequencies; [max_lag + 1], float64.
    """
    T = len(tokens)
    rates = torch.stack([(tokens[lag:] == tokens[: T - lag]).double().mean() for lag in range(max_lag + 1)])
    frequencies: Tensor = tokens.unique(return_counts=True)[1].double() / T
    chance = frequencies.square().sum()
    return (rates - chance) / (1 - chance)


def suggested_dilation(series: Tensor, max_lag: int | None = None) -> int | None:
    """The dilation factor d that a series [T] or [T, N] suggests, at most `max_lag`; None if nothing repeats.

    It is the first dominant peak of the differences' autocorrelation: one that lies after the first zero crossing, is
    at least half as high as the highest peak there (a period also peaks at its multiples, sometimes higher), is
    significant by Bartlett's formula, and repeats at 2d … 4d with lower values between. The zero crossing excludes the
    shoulder of a slow wave at lag 2 or 3: noise on such a wave makes the first autocorrelation of its differences
    negative. Since the top of a wave is flat, d is the lag of the peak whose multiples are highest on average.
    """
    max_lag = max_lag or min(LONGEST, len(series) // 4)
    return _first_dominant_peak(autocorrelation(series, max_lag), len(series))


def suggested_token_dilation(tokens: Tensor, max_lag: int | None = None) -> int | None:
    """The dilation factor d that tokens [T] suggest: the first dominant diagonal of their recurrence plot, or None."""
    max_lag = max_lag or min(LONGEST, len(tokens) // 4)
    return _first_dominant_peak(token_autocorrelation(tokens, max_lag), len(tokens))


def _first_dominant_peak(r: Tensor, length: int) -> int | None:
    values: list[float] = r.tolist()
    start = next((lag for lag, value in enumerate(values) if value <= 0), None)
    if start is None:
        return None
    # Bartlett: the standard error at a lag beyond which all autocorrelations are 0.
    error = math.sqrt((1 + 2 * sum(value**2 for value in values[1:start])) / length)
    highest = max(values[start:])
    if highest < max(FLOOR, ERRORS * error):
        return None
    end, high = start, SHARE * highest
    while (first := next((lag for lag in range(end, len(values)) if values[lag] >= high), None)) is not None:
        end = next((lag for lag in range(first, len(values)) if values[lag] < high), len(values))
        if max(range(first, end), key=values.__getitem__) == len(values) - 1:
            return None  # still rising: the peak is at a larger lag
        peak = max(range(first, end), key=lambda lag: fmean(values[lag::lag]))
        if _comes_again(values, peak):
            return peak
    return None


def _comes_again(values: Sequence[float], peak: int) -> bool:
    multiples = values[2 * peak : TIMES * peak + 1 : peak]
    if not multiples:
        return True  # beyond max_lag
    between = min(values[peak : 2 * peak])
    return fmean(multiples) >= AGAIN * values[peak] and between < SHARE * min(values[peak], multiples[0])
