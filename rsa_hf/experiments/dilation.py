"""The dilation factor d, from autocorrelation plots of series and recurrence plots of text and code (section 3).

Each source is analysed as a whole and in pieces, which take the place of seeds: does every piece suggest the same d?
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rsa_hf.experiments.byte_models import read_corpus
from rsa_hf.experiments.forecasting.series import load_series
from rsa_hf.experiments.runner.conclusion import Conclusion, Verdict
from rsa_hf.experiments.runner.experiment import Experiment, Size
from rsa_hf.experiments.runner.summary import Row, Run, Settings, Values, find_rows
from rsa_hf.experiments.theory.dilation import (
    autocorrelation,
    recurrence_plot,
    recurrence_rate,
    suggested_dilation,
    suggested_token_dilation,
    token_autocorrelation,
)
from rsa_hf.plots import COLOURS, panels
from rsa_hf.tasks.language_modeling import TrainingBlocks
from rsa_hf.tasks.text8 import clean_text8

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
    source, max_lag = str(settings["source"]), int(settings["max_lag"])
    if source in PERIODS:
        series = load_series(source)
        x = _piece(series.values[: series.part("train").stop], settings)
        r, d = autocorrelation(x, max_lag), suggested_dilation(x, max_lag)
        values: Values = {"as expected": float(d == PERIODS[source])}
    else:
        tokens = _piece(_tokens(source, int(settings["bytes"])), settings)
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
        values |= {"first zero crossing": float(start), "highest peak behind it": float(r[start:].max())}
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
    return x.tensor_split(int(settings["pieces"]))[int(settings["seed"])]


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Confirmed if the first series suggests its period, as a whole and in each piece."""
    agree = [row for source in PERIODS for row in find_rows(rows, "as expected", source=source)]
    findings = []
    for source in dict.fromkeys(str(row.settings["source"]) for row in agree):
        pieces = [row for row in agree if row.settings["source"] == source and row.settings["pieces"] != 1]
        [found] = find_rows(rows, "suggested d", source=source, pieces=1)
        text = f"{source} suggests {_d(found.mean)} (a day is {PERIODS[source]} steps)"
        text += "".join(f"; {round(row.mean * row.seeds)} of {row.seeds} pieces suggest a day" for row in pieces)
        findings.append(text)
    for row in find_rows(rows, "suggested d", pieces=1):
        if row.settings["source"] in TEXTS:
            source = row.settings["source"]
            names = ("first zero crossing", "highest peak behind it")
            behind = [each.mean for name in names for each in find_rows(rows, name, source=source, pieces=1)]
            why = "every diagonal is denser than chance, and none stands out"
            if behind:
                start, peak = behind
                why = (
                    f"diagonals fall to the density of chance at lag {start:.0f}, and after it the densest is "
                    f"{100 * peak:.1f} % above chance"
                )
            findings.append(f"the recurrence plot of {source} suggests {_d(row.mean)}: {why}")
    first = [row for row in agree if row.settings["source"] == agree[0].settings["source"]]
    right, count = sum(round(row.mean * row.seeds) for row in first), sum(row.seeds for row in first)
    sentence = f"{first[0].settings['source']} suggests a day as d in {right} of {count} cases: as a whole"
    if count == 1:
        sentence += " only. Pieces need more than one seed."
        verdict: Verdict = "not measurable at this size" if right else "not confirmed"
    else:
        sentence += ", and in pieces."
        verdict = "confirmed" if right == count else "not confirmed"
    return Conclusion(verdict, sentence, tuple(findings))


def _d(mean: float) -> str:
    return f"d = {mean:.0f}" if mean else "no d"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Autocorrelations with the suggested d, and a recurrence plot of the beginning of each text."""
    sources = list(dict.fromkeys(str(run.settings["source"]) for run in runs))
    whole = {str(run.settings["source"]): run.values for run in runs if run.settings["pieces"] == 1}
    texts = [source for source in sources if "tokens" in whole[source]]
    with panels(path, len(sources) + len(texts), columns=4) as grid:
        for axes, source in zip(grid, sources, strict=False):
            values = whole[source]
            r, d = values["autocorrelation"], values["suggested d"]
            assert isinstance(r, list)
            axes.axhline(0, color="#666666", linewidth=0.8)
            axes.plot(range(1, len(r)), r[1:], color=COLOURS[0], linewidth=1, label="points, beyond chance")
            if source in texts:
                lines = values["lines"]
                assert isinstance(lines, list)
                axes.plot(range(1, len(r)), lines[1:], color=COLOURS[2], linewidth=1, label=f"on lines of ≥ {LINE}")
                axes.legend()
            if d:
                axes.axvline(d, color=COLOURS[1], linestyle="--", linewidth=1)
            axes.set_title(f"{source}: {_d(float(d))}", loc="left")  # type: ignore[arg-type]
            axes.set_xlabel("lag τ")
            axes.set_ylabel("share of the diagonal" if source in texts else "autocorrelation of differences")
        for axes, source in zip(grid[len(sources) :], texts, strict=True):
            plot = recurrence_plot(torch.tensor(whole[source]["tokens"], dtype=torch.long))
            axes.imshow(plot, cmap="Greys", origin="lower", interpolation="nearest")
            axes.set_title(f"{source}, recurrence plot", loc="left")
            axes.set_xlabel("token s")
            axes.set_ylabel("token t")


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
