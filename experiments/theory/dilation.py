r"""Choose the dilation factor d (paper, section 3): autocorrelation of series, recurrence plots of tokens.

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
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "autocorrelation",
    "recurrence_plot",
    "recurrence_rate",
    "suggested_dilation",
    "suggested_token_dilation",
    "token_autocorrelation",
]

LONGEST = 512
# A peak counts if it is at least this share of the highest: among a period and its multiples, the first is the period.
SHARE = 0.5
# A period repeats: the mean at 2d, 3d and 4d is at least this share of the peak.
AGAIN, TIMES = 0.1, 4
# Required height in standard errors. The highest of 512 lags of white noise is about 3 above 0.
ERRORS = 5.0
FLOOR = 0.05  # minimum height of the highest peak


def autocorrelation(series: Tensor, max_lag: int, *, differenced: bool = True) -> Tensor:
    """Autocorrelation of a series, averaged over its variables.

    r_τ = Σ_t (x_t − x̄)(x_{t+τ} − x̄) / Σ_t (x_t − x̄)², of each variable.

    Args:
        series: shape [T] or [T, N].
        max_lag: the largest τ.
        differenced: use x_t − x_{t−1}. A trend or a slow wave makes all autocorrelations large and moves the peaks.

    Returns:
        r_0 … r_max_lag, shape [max_lag + 1], float64.

    Raises:
        ValueError: invalid lag, an entry that is not finite, or a constant variable.
    """
    x = series.detach().double()
    if not bool(x.isfinite().all()):
        raise ValueError("series has entries that are not finite. Fill the gaps first.")
    x = x[:, None] if x.dim() == 1 else x
    # A constant leaves rounding errors, tiny relative to its size.
    eps = torch.finfo(series.dtype if series.is_floating_point() else x.dtype).eps
    rounding = len(x) * (4 * eps * x.abs().amax(0)).square()
    if differenced:
        x = x.diff(dim=0)
    _check_lag(max_lag, len(x))
    x = x - x.mean(0)
    total = x.square().sum(0)
    if bool((total <= rounding).any()):
        after = " after differencing" if differenced else ""
        raise ValueError(
            f"variable {int((total <= rounding).nonzero()[0])} of {len(total)} is constant{after} and has no "
            "autocorrelation. Leave it out."
        )
    # Padded, so that the end of the series does not wrap to its beginning.
    spectrum = torch.fft.rfft(x, n=2 * len(x), dim=0).abs().square()
    products = torch.fft.irfft(spectrum, dim=0)[: max_lag + 1]
    found: Tensor = (products / total).mean(1)
    return found


def recurrence_plot(tokens: Tensor) -> Tensor:
    """R[t, s]: whether token t equals token s; from [T] to booleans [T, T]."""
    return tokens[:, None] == tokens


def recurrence_rate(tokens: Tensor, max_lag: int, line: int = 1) -> Tensor:
    """Share of points of each diagonal of the recurrence plot that lie on lines.

    Args:
        tokens: shape [T], integers.
        max_lag: the largest τ.
        line: minimum number of consecutive points on the diagonal that form a line; 1 counts all points.

    Returns:
        The share of the T − τ points of diagonal τ, shape [max_lag + 1], float64.

    Raises:
        ValueError: invalid lag.
    """
    _check_lag(max_lag, len(tokens))
    rates = []
    for lag in range(max_lag + 1):
        same = tokens[lag:] == tokens[: len(tokens) - lag]
        if line > 1:
            # Where `line` recurrent points in a row begin, and the points that such a line covers.
            begins = F.pad(same, (0, line - 1)).unfold(0, line, 1).all(1)
            same = F.pad(begins, (line - 1, 0)).unfold(0, line, 1).any(1)
        rates.append(same.double().mean())
    return torch.stack(rates)


def token_autocorrelation(tokens: Tensor, max_lag: int) -> Tensor:
    """Autocorrelation of tokens [T] as one-hot vectors: the recurrence rate above chance, at most 1.

    Returns:
        (rate − chance) / (1 − chance), where chance is Σ p² over the tokens' frequencies; [max_lag + 1], float64.
        NaN if all tokens are equal.

    Raises:
        ValueError: invalid lag.
    """
    frequencies: Tensor = tokens.unique(return_counts=True)[1].double() / len(tokens)
    chance = frequencies.square().sum()
    return (recurrence_rate(tokens, max_lag) - chance) / (1 - chance)


def suggested_dilation(series: Tensor, max_lag: int | None = None) -> int | None:
    """The dilation factor d that a series suggests: the first dominant peak of its differences' autocorrelation.

    A peak is dominant if it lies after the first zero crossing, is at least half as high as the highest peak there (a
    period also peaks at its multiples, sometimes higher), is significant by Bartlett's formula, and repeats at
    2d … 4d with lower values between. The zero crossing excludes the shoulder of a slow wave at lag 2 or 3: noise on
    such a wave makes the first autocorrelation of its differences negative. Since the top of a wave is flat, d is the
    lag of the peak whose multiples are highest on average.

    Args:
        series: shape [T] or [T, N]; autocorrelations are averaged over variables.
        max_lag: largest d; default: a quarter of T, at most 512.

    Returns:
        d, or None if nothing repeats.

    Raises:
        ValueError: as `autocorrelation`.
    """
    max_lag = min(LONGEST, len(series) // 4) if max_lag is None else max_lag
    return _first_dominant_peak(autocorrelation(series, max_lag), len(series))


def suggested_token_dilation(tokens: Tensor, max_lag: int | None = None) -> int | None:
    """The dilation factor d that tokens suggest: the first dominant diagonal of their recurrence plot.

    Args:
        tokens: shape [T], integers.
        max_lag: largest d; default: a quarter of T, at most 512.

    Returns:
        d, or None if no diagonal stands out, as in most text.
    """
    max_lag = min(LONGEST, len(tokens) // 4) if max_lag is None else max_lag
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


def _check_lag(max_lag: int, length: int) -> None:
    if not 1 <= max_lag < length:
        raise ValueError(f"max_lag={max_lag}: a lag from 1 to {length - 1}, one less than there are steps, is needed.")
