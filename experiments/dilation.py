r"""The dilation factor d, from autocorrelation of series and recurrence plots of text and code (paper, section 3).

A dilated head reaches back d, 2d, 3d, … steps, so d should be the period of the data. In a series that is a peak of
the autocorrelation; in tokens it is a diagonal of the recurrence plot, R[t, s] = 1 where token t equals token s
(Webber et al., 2016), with more points than others. Both are the same measure: with tokens as one-hot vectors, the
share of points on diagonal τ above chance is an autocorrelation.

Each source is analysed as a whole and in pieces, which take the place of seeds: does every piece suggest the same d?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from experiments.corpora import read_corpus, training_blocks
from experiments.forecasting.series import load_series
from experiments.runner.experiment import Experiment, Size
from experiments.runner.panels import COLOURS, panels
from experiments.runner.summary import Conclusion, Rows, Run, Settings, Values, Verdict
from rsa_hf.tasks.text8 import clean_text8

# Steps in a day; published for ETTh1 at 24 hours. The first of them decides the verdict.
PERIODS = {"ETTh1": 24, "seasonal-24": 24, "ETTh2": 24, "ETTm1": 96, "WTH": 24}
TEXTS = ("enwik8", "text8", "wikitext-2", "python")
SOURCES: dict[Size, tuple[str, ...]] = {
    "toy": ("seasonal-24", "python"),
    **dict.fromkeys(("quick", "full"), ("ETTh1", "ETTh2", "ETTm1", "WTH", *TEXTS)),
}
BYTES: dict[Size, int] = {"toy": 2_000, "quick": 20_000, "full": 400_000}
MAX_LAG: dict[Size, int] = {"toy": 80, "quick": 250, "full": 512}
CROSSING, PEAK = "first zero crossing", "highest peak behind it"
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


# --- the experiment ------------------------------------------------------------


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Each source as a whole, and in as many pieces as seeds."""
    amount = {"bytes": BYTES[size] * seeds}
    return [
        {"source": source, "max_lag": MAX_LAG[size]}
        | (amount if source in TEXTS else {})
        | {"pieces": pieces, "seed": piece}
        for source in SOURCES[size]
        for pieces in dict.fromkeys((1, seeds))
        for piece in range(pieces)
    ]


def measure(settings: Settings) -> Values:
    """The suggested d of one piece, 0 for none, and the height of its peak."""
    source, max_lag = settings["source"], settings["max_lag"]
    if source in PERIODS:
        series = load_series(source)
        x = _piece(series.values[: series.part("train").stop], settings)
        r, d = autocorrelation(x, max_lag), suggested_dilation(x, max_lag)
        values: Values = {"as expected": float(d == PERIODS[source])}
    else:
        tokens = _piece(_tokens(source, settings["bytes"]), settings)
        r, d = token_autocorrelation(tokens, max_lag), suggested_token_dilation(tokens, max_lag)
        values = {}
    values |= {"suggested d": float(d or 0), "autocorrelation": [round(value, 5) for value in r.tolist()]}
    # Peaks are searched for after the first zero crossing.
    crossings = (r <= 0).nonzero()
    if len(crossings):
        start = int(crossings[0])
        values |= {CROSSING: float(start), PEAK: float(r[start:].max())}
    return values


def _tokens(source: str, count: int) -> Tensor:
    text = read_corpus("enwik8" if source == "text8" else source, count, 1_000, 500)
    tokens = training_blocks(text).token_ids
    return torch.tensor(list(clean_text8(bytes(tokens.tolist())))) if source == "text8" else tokens


def _piece(x: Tensor, settings: Settings) -> Tensor:
    return x.tensor_split(settings["pieces"])[settings["seed"]]


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if the first series suggests its period, as a whole and in each piece."""
    series = [source for source in PERIODS if rows.find("as expected", source=source)]
    findings = []
    for source in series:
        d = _d(rows.mean("suggested d", source=source, pieces=1))
        findings.append(f"{source} suggests {d} (a day is {PERIODS[source]} steps)")
        for row in rows.find("as expected", source=source)[1:]:
            findings[-1] += f"; {round(row.mean * row.seeds)} of {row.seeds} pieces suggest a day"
    for row in rows.find("suggested d", pieces=1):
        if row.settings["source"] in TEXTS:
            why = "every diagonal is denser than chance, and none stands out"
            if rows.find(CROSSING, **row.settings):
                why = (
                    f"diagonals fall to the density of chance at lag {rows.mean(CROSSING, **row.settings):.0f}, and "
                    f"after it the densest is {100 * rows.mean(PEAK, **row.settings):.1f} % above chance"
                )
            findings.append(f"the recurrence plot of {row.settings['source']} suggests {_d(row.mean)}: {why}")
    right, count = rows.find("as expected", source=series[0]).counts()
    verdict: Verdict = "confirmed" if right == count else "not confirmed"
    which = "as a whole, and in pieces."
    if count == 1:
        which = "as a whole only. Pieces need more than one seed."
        verdict = "not measurable at this size" if right else "not confirmed"
    sentence = f"{series[0]} suggests a day as d in {right} of {count} cases: {which}"
    return Conclusion(verdict, f"{series[0]} suggests a day in {right} of {count} cases", sentence, tuple(findings))


def _d(mean: float) -> str:
    return f"d = {mean:.0f}" if mean else "no d"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Autocorrelations with the suggested d; of a text, the points on each diagonal beyond chance."""
    whole = {run.settings["source"]: run.values for run in runs if run.settings["pieces"] == 1}
    with panels(path, len(whole), columns=4) as grid:
        for axes, (source, values) in zip(grid, whole.items(), strict=True):
            axes.axhline(0, color="#666666", linewidth=0.8)
            r, d = values["autocorrelation"], values["suggested d"]
            axes.plot(range(1, len(r)), r[1:], color=COLOURS[0], linewidth=1)
            if d:
                axes.axvline(d, color=COLOURS[1], linestyle="--", linewidth=1)
            label = "points beyond chance" if source in TEXTS else "autocorrelation of differences"
            axes.set(title=f"{source}: {_d(d)}", xlabel="lag τ", ylabel=label)


EXPERIMENT = Experiment(
    name="dilation",
    claim="The autocorrelation plot of ETTh1 suggests the published d = 24, in each piece of the training data.",
    published="ETTh1, 24 hours: d = 24. Text, d of the four dilated heads: enwik8 3, 6, 9, 12; text8 6, 6, 12, 12.",
    seeds={"toy": 2, "quick": 5, "full": 10},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=draw,
    revision=3,
)
