"""What an experiment is: cells to run, rows that sum them up, a conclusion that can go either way, and a figure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rsa_hf.experiments.runner.cells import Cell, Result, Values
from rsa_hf.experiments.runner.conclusion import Conclusion
from rsa_hf.experiments.runner.summary import Row, summarise

__all__ = [
    "EXPERIMENTS",
    "SIZES",
    "Experiment",
    "Meanings",
    "Size",
    "cell_key",
    "find_experiment",
    "is_written",
]

# In the order of the page; each with what it is about.
EXPERIMENTS = {
    "sample-efficiency": "tokens needed to reach the unpatched model's final bits per byte",
    "fine-tune": "patched pretrained models against the same without RSA, at 1 %, 10 % and 100 % of the data",
    "synthetic": "prediction errors of RSA and linear RNNs over those of nonlinear RNNs (appendix B, figure 6)",
    "regular-languages": "formal languages, at lengths beyond those trained on",
    "forecasting": "ETT and Weather, Informer and others with and without RSA",
    "language-model": "Transformer-XL and Block-Recurrent Transformer with and without RSA",
    "linear-rnn": "a linear RNN and its heads have the same hidden states (propositions 1, 2 and 4)",
    "dilation": "the dilating factor, from autocorrelation and recurrence plots (section 3)",
    "search-heads": "a searched head plan against the default one (section 3)",
}

# What the words among the settings of cells stand for: by setting and word, in values that JSON knows.
Meanings = Mapping[str, Mapping[str, Any]]
Size = Literal["toy", "quick", "full"]
SIZES: tuple[Size, ...] = ("toy", "quick", "full")


def _no_words(cells: Sequence[Cell]) -> Meanings:
    return {}


def _never(cell: Cell) -> bool:
    return False


@dataclass(frozen=True)
class Experiment:
    """One claim of the paper, as something to run.

    Attributes:
        name: what the command line calls it, one of `EXPERIMENTS`.
        claim: the claim, in one sentence that can be false.
        published: the published figures and where they stand, or that there are none.
        seeds: how many seeds each size has unless told otherwise.
        cells: (size, seeds) → all cells, in the order in which they run. Cells of one key are one cell.
        run_cell: runs one cell. It seeds itself from the cell alone: the same cell gives the same values, times aside,
            whatever ran before it. It may raise MissingDataError or ImportError where data or a package is missing.
        conclude: rows → conclusion. It must be able to say "not confirmed".
        draw: (results, path): writes the figure.
        summarise: results → rows.
        remark: what a reader has to know of the models or the data to see why it comes out as it does.
        parts: the settings by which a part of the cells can be run alone; `summarise` and `conclude` do with any.
        search_by: result → score, the least being the best, by which learning rates are searched with the first seed
            alone, see rate_search.py; None: every seed runs every cell.
        needs_gpu: which cells are too large for a CPU; without a GPU they are not run, and shown if they have been.
        meanings: cells → what the words among their settings stand for, such as sizes and plans.
        revision: to be raised when `run_cell` comes to measure something else: cells of older ones are run again.
    """

    name: str
    claim: str
    published: str
    seeds: Mapping[Size, int]
    cells: Callable[[Size, int], Sequence[Cell]]
    run_cell: Callable[[Cell], Values]
    conclude: Callable[[Sequence[Row]], Conclusion]
    draw: Callable[[Sequence[Result], Path], None]
    summarise: Callable[[Sequence[Result]], list[Row]] = field(default=summarise)
    remark: str = ""
    parts: tuple[str, ...] = ()
    search_by: Callable[[Result], float] | None = None
    needs_gpu: Callable[[Cell], bool] = _never
    meanings: Callable[[Sequence[Cell]], Meanings] = _no_words
    revision: int = 1


def cell_key(cell: Cell, revision: int) -> str:
    """A name for a cell that depends on its settings and the experiment's revision, not on their order."""
    text = json.dumps([revision, dict(cell)], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_written(name: str) -> bool:
    """Whether this version of rsa_hf has the experiment."""
    return find_spec(_module(name)) is not None


def find_experiment(name: str) -> Experiment:
    """The experiment of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}.")
    if not is_written(name):
        raise ValueError(f"the experiment {name} is not in this version of rsa_hf; `rsa-hf reproduce list` shows all.")
    experiment = import_module(_module(name)).EXPERIMENT
    assert isinstance(experiment, Experiment)
    return experiment


def _module(name: str) -> str:
    return f"rsa_hf.experiments.{name.replace('-', '_')}"
