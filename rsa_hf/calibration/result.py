"""What a calibration has found: the config, a table, and a heatmap of all heads."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rsa_hf.config import HeadConfig, RSAConfig
from rsa_hf.plots import saved_figure
from rsa_hf.utils.text import format_table


@dataclass(frozen=True)
class CalibratedHead:
    """A head that was chosen, as the config names it.

    `derivative` is that of the loss with respect to the share g · Σ |f(τ)| of its REM, in the plain model. Its first
    term, the effect of recurrence, is below zero by `certainty` standard errors.
    """

    config: HeadConfig
    derivative: float
    certainty: float


@dataclass(frozen=True)
class Calibration:
    """The outcome of a calibration; `print` shows a table.

    Attributes:
        config: names no heads if no gain was shown.
        heads: the heads of the config.
        derivatives: for every layer and every head in it, the derivative of the loss with respect to the share of the
            head's best REM.
        num_rows, loss: number of rows, and the plain model's mean loss.
        gain: how much the mean loss of rows falls with heads that were chosen on other rows.
        gain_error: standard error of the gain, over rows.
        gain_without_recurrence: the same gain with P = 0 on these heads, so that their gates only damp attention.
        head_steps: number of steps for which the new head of a classifier was trained, before everything else.
        rows_needed: if no gain was shown, the number of rows with which one could be shown. None if recurrence did not
            help the rows at all and there were as many as `max_rows` is by default.
    """

    config: RSAConfig
    heads: tuple[CalibratedHead, ...]
    derivatives: tuple[tuple[float, ...], ...]
    num_rows: int
    loss: float
    gain: float
    gain_error: float
    gain_without_recurrence: float
    head_steps: int
    rows_needed: int | None

    @property
    def scores(self) -> dict[str, float]:
        """The loss without heads, and of held-out rows with heads that were chosen on the others, for a model card."""
        return {"loss, plain": self.loss, "loss, held out": self.loss - self.gain}

    def to_dict(self) -> dict[str, Any]:
        """As plain lists and numbers, for JSON."""
        return {**asdict(self), "config": self.config.to_dict()}

    def plot(self, path: str | Path) -> None:
        """Draw a heatmap, layers × heads, of the derivatives; chosen heads are marked with their gates.

        Raises:
            ImportError: matplotlib is not installed.
        """
        heads = max(map(len, self.derivatives))
        rows = [[*of_layer, *[math.nan] * (heads - len(of_layer))] for of_layer in self.derivatives]
        largest = max(abs(derivative) for of_layer in self.derivatives for derivative in of_layer)
        with saved_figure(path, 1.6 + 0.42 * heads, 1.2 + 0.24 * len(rows)) as figure:
            axes = figure.subplots()
            # White at 0.
            figure.colorbar(axes.imshow(rows, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto"))
            for head in self.heads:
                place = (head.config.head, head.config.layer)
                axes.text(*place, f"{head.config.gate:.2f}", ha="center", va="center", fontsize=6)
            axes.grid(visible=False)
            axes.set_xlabel("head")
            axes.set_ylabel("layer")
            title = "derivative of the loss by the share of the best REM; gates of chosen heads"
            axes.set_title(title, loc="left", fontsize=8)

    def __str__(self) -> str:
        low, high = (self.gain + sign * 1.96 * self.gain_error for sign in (-1, 1))  # a normal distribution's 95 %
        checked = (
            f"the loss of {self.num_rows} rows, {self.loss:.4f}, falls by {self.gain:.4f} ({low:.4f} … {high:.4f}) "
            f"with heads chosen on other rows, and by {self.gain_without_recurrence:.4f} with their gates alone "
            "(P = 0)"
        )
        if self.head_steps:
            checked += f", after the classifier's head was trained for {self.head_steps} steps"
        if not self.heads:
            if self.gain > 0:
                few = f": {self.num_rows} rows are too few to tell; with {self.rows_needed} it could be"
                return f"no heads: {checked}. This gain is not enough to be shown{few if self.rows_needed else ''}"
            few = f", but {self.num_rows} rows are few: {self.rows_needed} would tell more" if self.rows_needed else ""
            return f"no heads: {checked}. There is no gain on held-out rows{few}"
        rows = [("layer", "head", "REM", "d", "decay", "theta", "free lags", "gate", "derivative", "standard errors")]
        for head in self.heads:
            config = head.config
            angle = "" if config.kind == "regular" else f"{config.theta:+.3f}"
            lags = " ".join(f"{weight:+.2f}" for weight in config.free_lags or ())
            rem = (config.kind, str(config.dilation), f"{config.decay:+.2f}", angle, lags, f"{config.gate:.4f}")
            found = (f"{head.derivative:+.4f}", f"{-head.certainty:.1f}")
            rows.append((str(config.layer), str(config.head), *rem, *found))
        return f"{format_table(rows)}\n{len(self.heads)} heads; {checked}"
