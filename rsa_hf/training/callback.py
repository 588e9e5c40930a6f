"""`RSACallback`: gates and rates in the logs of a plain `transformers.Trainer`."""

from __future__ import annotations

import logging
from statistics import fmean
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rsa_hf.report import rsa_report

__all__ = ["RSACallback"]

logger = logging.getLogger(__name__)


class RSACallback(TrainerCallback):
    """Logs gates and rates after every log of the training loss: `trainer.add_callback(RSACallback(trainer))`.

    They are logged with `trainer.log`, as a record of their own at the same step, so every tracker that is on gets
    them, wherever it stands among the callbacks, and so does `state.log_history`: `rsa/gate`, the mean over all
    layers, and for each RSA layer, counted in module order, `rsa/gate/layer_NN` and `rsa/decay/layer_NN`: the means
    of g and of |λ| or γ over its heads. `rsa_hf.rsa_report` has every head.

    Args:
        trainer: the Trainer whose model is reported on and that logs.
    """

    def __init__(self, trainer: Trainer) -> None:
        # No event is told of the Trainer, and what a callback adds to the `logs` of an event comes too late for the
        # trackers, which stand before it in the list.
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say so where there is nothing to log."""
        if not rsa_report(kwargs["model"]).layers:
            logger.warning("RSACallback has nothing to log: the model has no RSA heads. Call patch_model first.")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let a record with gates and rates follow one with the training loss."""
        if "loss" in (kwargs.get("logs") or {}):
            values = _gates_and_rates(kwargs["model"])
            if values:
                self.trainer.log(values)


def _gates_and_rates(model: nn.Module) -> dict[str, float]:
    layers = rsa_report(model).layers
    if not layers:
        return {}
    gates = [fmean(head.gate for head in layer.heads) for layer in layers]
    decays = [fmean(abs(head.decay) for head in layer.heads) for layer in layers]
    values = {"rsa/gate": fmean(gates)}
    values |= {f"rsa/gate/layer_{i:02d}": gate for i, gate in enumerate(gates)}
    values |= {f"rsa/decay/layer_{i:02d}": decay for i, decay in enumerate(decays)}
    return values
