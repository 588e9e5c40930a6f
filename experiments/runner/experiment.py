"""The definition of an experiment: a grid of runs, what each measures, a summary, a verdict and a figure."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from experiments.runner.summary import Conclusion, Rows, Run, Settings, Values, summarise

# In the order of the report, each with its subject.
EXPERIMENTS = {
    "defaults": "how RSA heads start in a model that is trained from scratch",
    "confirmation": "the start that defaults chose, with other seeds and on other texts",
    "rivals": "other positions and other short memories against RSA, on models trained from scratch",
    "recall": "associative recall: how soon a model names the value that a key was paired with",
    "code-encoder": "masked language modelling of code from scratch, with and without RSA",
    "defect": "defect detection with the encoders of code-encoder, against rivals",
    "calibrate": "pretrained models with the heads that calibrate chooses, against scaled heads, LoRA and others",
    "synthetic": "prediction errors of RSA and linear RNNs relative to nonlinear RNNs (appendix B, figure 6)",
    "regular-languages": "formal languages at lengths beyond the training lengths",
    "forecasting": "ETT and Weather forecasts by the Informer and PatchTST, with and without RSA, and by DLinear",
    "language-model": "Transformer-XL and Block-Recurrent Transformer with and without RSA",
}

Size = Literal["toy", "quick", "full"]
SIZES: tuple[Size, ...] = ("toy", "quick", "full")


class RequestError(ValueError):
    """A request that cannot be run; the message says what is possible."""


@dataclass(frozen=True)
class Experiment:
    """One claim of the paper, as something to run. Where variants of a model are compared, see comparison.py."""

    name: str  # one of `EXPERIMENTS`
    claim: str  # one sentence that can be false
    published: str  # the published figures and their source, or that there are none
    seeds: Mapping[Size, int]
    grid: Callable[[Size, int], Sequence[Settings]]  # (size, seeds) → the settings of all runs, in running order
    # It seeds itself from the settings alone, so that equal settings give equal values whatever ran before.
    measure: Callable[[Settings], Values]
    conclude: Callable[[Rows], Conclusion]  # must be able to return "not confirmed"
    draw: Callable[[Sequence[Run], Path], None] | None = None
    summarise: Callable[[Sequence[Run]], Rows] = field(default=summarise)
    remark: str = ""  # what a reader must know about models or data to interpret the result
    parts: tuple[str, ...] = ()  # settings that `--only` selects by; `conclude` must accept any selection
    # Run → score, lower is better: learning rates are searched with the first seed, see rate_search.py.
    search_by: Callable[[Run], float] | None = None
    # Runs → number of best learning rates that are the lowest or the highest tried, and of all.
    edges: Callable[[Sequence[Run]], tuple[int, int]] | None = None
    revision: int = 1  # increase it when `measure` changes its meaning; older runs are then run again

    def keyed_grid(self, size: Size, seeds: int) -> dict[str, Settings]:
        """The settings of all runs by their keys."""
        return {run_key(settings, self.revision): settings for settings in self.grid(size, seeds)}


def combinations(**choices: Iterable[Any]) -> list[dict[str, Any]]:
    """All combinations of settings; the last one changes fastest."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def run_key(settings: Settings, revision: int) -> str:
    """Identifier of a run, independent of the order of its settings."""
    text = json.dumps([revision, dict(settings)], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_experiment(name: str) -> Experiment:
    """Import an experiment by name; a RequestError if there is none."""
    if name not in EXPERIMENTS:
        raise RequestError(f"there is no experiment {name!r}; choose from {', '.join(EXPERIMENTS)}.")
    experiment = import_module(f"experiments.{name.replace('-', '_')}").EXPERIMENT
    assert isinstance(experiment, Experiment)
    return experiment
