"""The dilation factor d, from autocorrelation plots of series and recurrence plots of text and code (section 3).

Each source is analysed as a whole and in pieces, which take the place of seeds: does every piece suggest the same d?
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.byte_models import read_corpus
from experiments.forecasting.series import load_series
from experiments.runner.experiment import Experiment, Size
from experiments.runner.summary import Conclusion, Rows, Run, Settings, Values, Verdict
from experiments.theory.dilation import (
    autocorrelation,
    recurrence_plot,
    recurrence_rate,
    suggested_dilation,
    suggested_token_dilation,
    token_autocorrelation,
)
from rsa_hf.plots import COLOURS, panels
from rsa_hf.tasks.text8 import clean_text8
from rsa_hf.tasks.text_data import TrainingBlocks

__all__ = ["EXPERIMENT"]

# Steps in a day; published for ETTh1 at 24 hours. The first of them decides the verdict.
PERIODS = {"ETTh1": 24, "seasonal-24": 24, "ETTh2": 24, "ETTm1": 96, "WTH": 24}
TEXTS = ("enwik8", "text8", "wikitext-2", "python")
SOURCES: dict[Size, tuple[str, ...]] = {
    "toy": ("seasonal-24", "python"),
    "quick": ("ETTh1", "ETTh2", "ETTm1", "WTH", *TEXTS),
    "full": ("ETTh1", "ETTh2", "ETTm1", "WTH", *TEXTS),
}
BYTES: dict[Size, int] = {"toy": 2_000, "quick": 20_000, "full": 400_000}
MAX_LAG: dict[Size, int] = {"toy": 80, "quick": 250, "full": 512}
CROSSING, PEAK = "first zero crossing", "highest peak behind it"
LINE = 4  # points in a row on a diagonal that form a line
SHOWN = 240  # tokens in a drawn recurrence plot


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Each source as a whole, and in as many pieces as seeds."""
    amount = {"bytes": BYTES[size] * seeds}
    return [
        {
            "source": source,
            "max_lag": MAX_LAG[size],
            **(amount if source in TEXTS else {}),
            "pieces": pieces,
            "seed": piece,
        }
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
        lines = recurrence_rate(tokens, max_lag, LINE)
        values = {"lines": _rounded(lines), "densest diagonal": float(lines[1:].argmax() + 1)}
        if settings["seed"] == 0:
            values["tokens"] = tokens[:SHOWN].double().tolist()
    values |= {"suggested d": float(d or 0), "autocorrelation": _rounded(r)}
    # Peaks are searched for after the first zero crossing.
    crossings = (r <= 0).nonzero()
    if len(crossings):
        start = int(crossings[0])
        values |= {CROSSING: float(start), PEAK: float(r[start:].max())}
    return values


def _rounded(x: Tensor) -> list[float]:
    return [round(value, 5) for value in x.tolist()]


def _tokens(source: str, count: int) -> Tensor:
    blocks = read_corpus("enwik8" if source == "text8" else source, count, 1_000, 500).train
    assert isinstance(blocks, TrainingBlocks)
    if source != "text8":
        return blocks.token_ids
    return torch.tensor(list(clean_text8(bytes(blocks.token_ids.tolist()))))


def _piece(x: Tensor, settings: Settings) -> Tensor:
    return x.tensor_split(settings["pieces"])[settings["seed"]]


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if the first series suggests its period, as a whole and in each piece."""
    series = [source for source in PERIODS if rows.find("as expected", source=source)]
    findings = []
    for source in series:
        found = rows.mean("suggested d", source=source, pieces=1)
        text = f"{source} suggests {_d(found)} (a day is {PERIODS[source]} steps)"
        for row in rows.find("as expected", source=source):
            if row.settings["pieces"] != 1:
                text += f"; {round(row.mean * row.seeds)} of {row.seeds} pieces suggest a day"
        findings.append(text)
    for row in rows.find("suggested d", pieces=1):
        if row.settings["source"] in TEXTS:
            why = "every diagonal is denser than chance, and none stands out"
            if rows.find(CROSSING, **row.settings):
                why = (
                    f"diagonals fall to the density of chance at lag {rows.mean(CROSSING, **row.settings):.0f}, and "
                    f"after it the densest is {100 * rows.mean(PEAK, **row.settings):.1f} % above chance"
                )
            findings.append(f"the recurrence plot of {row.settings['source']} suggests {_d(row.mean)}: {why}")
    first = rows.find("as expected", source=series[0])
    right, count = sum(round(row.mean * row.seeds) for row in first), sum(row.seeds for row in first)
    sentence = f"{series[0]} suggests a day as d in {right} of {count} cases: as a whole"
    if count == 1:
        sentence += " only. Pieces need more than one seed."
        verdict: Verdict = "not measurable at this size" if right else "not confirmed"
    else:
        sentence += ", and in pieces."
        verdict = "confirmed" if right == count else "not confirmed"
    return Conclusion(verdict, f"{series[0]} suggests a day in {right} of {count} cases", sentence, tuple(findings))


def _d(mean: float) -> str:
    return f"d = {mean:.0f}" if mean else "no d"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Autocorrelations with the suggested d, and a recurrence plot of the beginning of each text."""
    whole = {run.settings["source"]: run.values for run in runs if run.settings["pieces"] == 1}
    texts = {source: values["tokens"] for source, values in whole.items() if "tokens" in values}
    with panels(path, len(whole) + len(texts), columns=4) as grid:
        for axes, (source, values) in zip(grid, whole.items(), strict=False):
            lags, d = range(1, len(values["autocorrelation"])), values["suggested d"]
            axes.axhline(0, color="#666666", linewidth=0.8)
            axes.plot(
                lags, values["autocorrelation"][1:], color=COLOURS[0], linewidth=1, label="points, beyond chance"
            )
            if source in texts:
                axes.plot(lags, values["lines"][1:], color=COLOURS[2], linewidth=1, label=f"on lines of ≥ {LINE}")
                axes.legend()
            if d:
                axes.axvline(d, color=COLOURS[1], linestyle="--", linewidth=1)
            label = "share of the diagonal" if source in texts else "autocorrelation of differences"
            axes.set(title=f"{source}: {_d(d)}", xlabel="lag τ", ylabel=label)
        for axes, (source, tokens) in zip(grid[len(whole) :], texts.items(), strict=True):
            plot = recurrence_plot(torch.tensor(tokens))
            axes.imshow(plot, cmap="Greys", origin="lower", interpolation="nearest")
            axes.set(title=f"{source}, recurrence plot", xlabel="token s", ylabel="token t")


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
