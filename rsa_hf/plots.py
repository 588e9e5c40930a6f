"""Pictures of what RSA heads have learned, and training curves. They need matplotlib."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from rsa_hf.rem import lag_weights
from rsa_hf.report import HeadReport, LayerReport, RSAReport, rsa_report
from rsa_hf.utils.text import shorten

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
KIND_COLOURS = dict(zip(("regular", "cos", "sin"), COLOURS, strict=False))
KIND_FORMULAS = {"regular": r"regular  $\lambda^\tau$"} | {
    kind: rf"{kind}  $\gamma^\tau\,\{kind}(\tau\theta)$" for kind in ("cos", "sin")
}
GREY = "#666666"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
}
SHORTEST, LONGEST = 12, 256  # lag axis
DASHES = (0, (3, 1.5))


def plot_rem(model_or_report: nn.Module | RSAReport, path: str | Path) -> None:
    """Draw the decay curve f(τ) of every RSA head, one panel per RSA layer, and below them the gates per layer.

    A dilated head is drawn as a dashed line through the lags that it reaches. A bar is the mean gate of a layer, and
    dots are the gates of its heads.

    The file is usually a `.png`; its folder is created.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the model has no RSA heads.
    """
    report = model_or_report if isinstance(model_or_report, RSAReport) else rsa_report(model_or_report)
    if not report.layers:
        raise ValueError("the model has no RSA heads, so there is nothing to draw. Call patch_model first.")
    n = len(report.layers)
    columns = min(n, 4 if n <= 16 else 8)
    rows = math.ceil(n / columns)
    heads = [head for layer in report.layers for head in layer.heads]
    # The lag at which nine of ten heads have fallen to a twentieth.
    reach = 4.3 * sorted(head.half_life for head in heads)[int(0.9 * (len(heads) - 1))]
    end = math.ceil(min(max(reach, SHORTEST), LONGEST))
    signed = any(head.kind != "regular" or head.decay < 0 for head in heads)
    with saved_figure(path, max(6.4, 2.2 * columns + 0.8), 1.75 * rows + 3.2) as figure:
        upper, lower = figure.subfigures(2, 1, height_ratios=[1.75 * rows + 0.8, 2.4])
        grid = upper.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for i, axes in enumerate(grid.flat):
            if i >= n:
                axes.set_axis_off()
                continue
            _draw_heads(axes, report.layers[i], end)
            axes.set_title(report.layers[i].module, loc="left", fontsize=6.5)
            axes.set_ylim(-1.05 if signed else -0.05, 1.05)
            axes.tick_params(labelbottom=i + columns >= n)
        upper.supxlabel("lag τ (positions back)", fontsize=9)
        upper.supylabel("weight f(τ)", fontsize=9)
        handles = _legend_handles(heads)
        upper.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8.5)
        _draw_gates(lower.subplots(), report.layers)


def plot_training_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], path: str | Path, xlabel: str, ylabel: str, title: str
) -> None:
    """Draw one line per curve into a file, usually a `.png`; its folder is created.

    `curves` has for each label the points (x, y), sorted by x; a point that is not finite leaves a gap.
    """
    with saved_figure(path, 6.4, 4.0) as figure:
        axes = figure.subplots()
        styles = itertools.product(("-", "--", ":"), COLOURS)
        for (label, points), (style, colour) in zip(curves.items(), itertools.cycle(styles)):
            # A single point would be invisible as a line.
            marker = "o" if len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), style, color=colour, linewidth=1.8, marker=marker, label=label)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.legend()


def plot_confusion(labels: Sequence[int], predictions: Sequence[int], path: str | Path) -> None:
    """Draw the confusion matrix of a defect detector, with scikit-learn.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from sklearn.metrics import ConfusionMatrixDisplay

    with saved_figure(path, 4, 3.5) as figure:
        axes = figure.add_subplot()
        ConfusionMatrixDisplay.from_predictions(
            labels, predictions, labels=[0, 1], display_labels=["clean", "defective"], cmap="Blues", ax=axes
        )
        axes.grid(visible=False)


@contextmanager
def saved_figure(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """Yield a figure of the given size in inches; save it when the block ends without an error."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'rsa_hf[plot]'") from error
    with matplotlib.rc_context(STYLE):
        # A Figure made without pyplot needs no display and opens no window.
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Tight: a title may be wider than its axes.
        kind = Path(path).suffix[1:] or "png"  # or else matplotlib would add it to the name
        figure.savefig(path, format=kind, dpi=150, facecolor="white", bbox_inches="tight")


def _draw_heads(axes: Any, layer: LayerReport, end: int) -> None:
    axes.axhline(0, color=GREY, linewidth=0.6)
    for head in layer.heads:
        lags = torch.arange(head.dilation, max(end, head.dilation) + 1, head.dilation, device="cpu")
        weights = lag_weights(head.kind, head.decay, head.theta, head.dilation, head.free_lags, lags)
        style = DASHES if head.dilation > 1 else "-"
        axes.plot(lags, weights, color=KIND_COLOURS[head.kind], linestyle=style, linewidth=1.2, alpha=0.85)
    axes.set_xlim(0, end)


def _legend_handles(heads: Sequence[HeadReport]) -> list[Any]:
    from matplotlib.lines import Line2D

    kinds = [kind for kind in KIND_COLOURS if any(head.kind == kind for head in heads)]
    handles = [Line2D([], [], color=KIND_COLOURS[kind], label=KIND_FORMULAS[kind]) for kind in kinds]
    if dilations := sorted({head.dilation for head in heads if head.dilation > 1}):
        label = f"dilated by {shorten([str(d) for d in dilations])}"
        handles.append(Line2D([], [], color=GREY, linestyle=DASHES, label=label))
    return handles


def _draw_gates(axes: Any, layers: Sequence[LayerReport]) -> None:
    n = len(layers)
    gates = [[head.gate for head in layer.heads] for layer in layers]
    bars = axes.bar(range(n), [fmean(of_layer) for of_layer in gates], width=0.7, color="#B0C4D4")
    for i, of_layer in enumerate(gates):
        axes.plot([i] * len(of_layer), of_layer, ".", color=COLOURS[0], markersize=4, alpha=0.8)
    if n <= 16:
        axes.bar_label(bars, fmt="%.2f", fontsize=8, color=GREY, padding=3)
    axes.set_ylim(0, min(1.15, max(0.1, 1.25 * max(map(max, gates)))))
    margin = max(0.7, (6 - n) / 2)  # no bar as wide as the page
    axes.set_xlim(-margin, n - 1 + margin)
    axes.set_xticks(range(0, n, math.ceil(n / 24)))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("RSA layer, in the order of the panels")
    axes.set_ylabel("gate g")
    axes.set_title("gates: 0 is attention only, 1 is recurrence only", loc="left")
