"""`RSACallback`: gates and rates in the logs of a plain `transformers.Trainer`."""

from __future__ import annotations

import inspect
import logging
from statistics import fmean
from types import FrameType
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from rsa_hf.report import rsa_report

__all__ = ["RSACallback"]

logger = logging.getLogger(__name__)


class RSACallback(TrainerCallback):
    """Adds gates and rates to every log of the training loss: `Trainer(..., callbacks=[RSACallback()])`.

    Into each such log, and so to every tracker that is on and into `state.log_history`, go `rsa/gate`, the mean
    over all layers, and for each RSA layer, counted in module order, `rsa/gate/layer_NN` and
    `rsa/decay/layer_NN`: the means of g and of |λ| or γ over its heads. `rsa_hf.rsa_report` has every head.
    """

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go before the trackers in the Trainer's list."""
        _move_to_front(self, inspect.currentframe())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go before the trackers also when added to the Trainer later; say so where there is nothing to log."""
        _move_to_front(self, inspect.currentframe())
        if not rsa_report(kwargs["model"]).layers:
            logger.warning("RSACallback has nothing to log: the model has no RSA heads. Call patch_model first.")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add gates and rates to a log that holds the training loss."""
        logs: dict[str, float] | None = kwargs.get("logs")
        if logs is None or "loss" not in logs:
            return
        values = _gates_and_rates(kwargs["model"])
        logs.update(values)
        # The Trainer has put a copy of the log into the history by now.
        if state.log_history:
            state.log_history[-1].update(values)


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


def _move_to_front(callback: RSACallback, frame: FrameType | None) -> None:
    """Make a callback the first in the list that is just calling it.

    Callbacks are called in the order of the list, with one and the same `logs`, and the Trainer puts those of the
    trackers before the user's: what a callback in its usual place adds to `logs` comes too late for them. No event
    is told of the list, so it is taken from the caller, which is `CallbackHandler.call_event`.
    """
    caller = frame.f_back if frame is not None else None
    handler = caller.f_locals.get("self") if caller is not None else None
    if not isinstance(handler, CallbackHandler) or callback not in handler.callbacks:
        logger.warning(
            "RSACallback did not find the Trainer's list of callbacks: gates and rates are in state.log_history, "
            "but trackers before it do not get them. Put it first in trainer.callback_handler.callbacks."
        )
        return
    handler.callbacks.remove(callback)
    handler.callbacks.insert(0, callback)
