"""Callbacks of a `transformers.Trainer`: gates and rates in its log, a quiet bar, stopping on a signal."""

import math
import signal
import threading
from typing import Any

from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rsa_hf.report import rsa_report

# Parts of the names of metrics that are left out of the line that an evaluation prints during training.
NOT_SHOWN = ("per_second", "time", "num_", "perplexity", "epoch", "majority", "share", "nats")


class DivergedError(FloatingPointError):
    """The loss became NaN or infinite."""


class RSACallback(TrainerCallback):
    """Logs gates and rates after each log of the training loss: `trainer.add_callback(RSACallback(trainer))`.

    They form a separate record at the same step, so every tracker and `state.log_history` get them: `rsa/gate`, the
    mean over all layers, and for each RSA layer in module order `rsa/gate/layer_NN` and `rsa/decay/layer_NN`, the
    means over its heads of g and of |λ| or γ. `rsa_hf.rsa_report` has the values of each head. An `RSATrainer` already
    has this callback.
    """

    def __init__(self, trainer: Trainer) -> None:
        # Events do not pass the Trainer, and when a callback can change `logs`, the trackers have them already.
        self.trainer = trainer

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log gates and rates after a record with the training loss."""
        if "loss" in (kwargs.get("logs") or {}):
            values = rsa_report(kwargs["model"]).scalars()
            if values:
                self.trainer.log(values)


class ProgressBar(ProgressCallback):
    """transformers' bars, with the loss beside the one for training, and a line of metrics after each evaluation."""

    training_bar: Any

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Print the metrics, and exclude the time of the evaluation from the estimate for training."""
        super().on_evaluate(args, state, control)  # type: ignore[no-untyped-call]
        if self.training_bar is None or not state.is_world_process_zero:
            return
        passed = metrics.get("eval_runtime", 0.0)
        self.training_bar.start_t += passed
        self.training_bar.last_print_t += passed
        shown = {
            key.removeprefix("eval_"): value
            for key, value in metrics.items()
            if isinstance(value, int | float) and not any(word in key for word in NOT_SHOWN)
        }
        words = ", ".join(f"{key} {value:.4g}" for key, value in shown.items())
        self.training_bar.write(f"step {state.global_step}: {words}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss beside the bar; a tracker, or trainer_state.json, has the rest."""
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix(loss=f"{logs['loss']:.4g}", refresh=False)


class StopOnSignal(TrainerCallback):
    """After SIGTERM or Ctrl-C, saves a checkpoint at the end of the step and ends the training.

    An evaluation that is due comes after the checkpoint, which is then saved again, with its scores. A second signal
    ends the process at once. With several processes, the signal may reach them in different steps, or reach only one
    of them. The processes agree on a step, and ignore further signals, because launchers repeat them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.signal: int | None = None  # the one that ended the training
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the signal handlers, which only the main thread of a process can do."""
        self.signal = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.signal is not None and self.trainer.accelerator.num_processes == 1:
            self.restore_handlers()
            signal.raise_signal(number)
        self.signal = number
        self.trainer.accelerator.set_trigger()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint and the end of the training."""
        accelerator = self.trainer.accelerator
        asked = self.signal is not None if accelerator.num_processes == 1 else accelerator.check_trigger()
        if asked:
            self.signal = self.signal or signal.SIGTERM
            if control.should_evaluate:
                assert self.trainer.model is not None
                self.trainer._save_checkpoint(self.trainer.model, trial=None)
            control.should_save = control.should_training_stop = True
            if args.save_total_limit == 1:
                args.save_total_limit = 2  # with 1 the Trainer would delete this checkpoint, and keep the best

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Skip the evaluation of an unfinished epoch."""
        if self.signal is not None and not float(state.epoch).is_integer():
            control.should_evaluate = control.should_save = False

    def restore_handlers(self) -> None:
        """Restore the signal handlers from before the training."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._before = {}


def require_finite(loss: Any, step: int) -> None:
    """Raise a `DivergedError` for a loss that is NaN or infinite."""
    if not math.isfinite(float(loss)):
        raise DivergedError(
            f"the loss is {float(loss)} after step {step}: training has diverged. Lower learning_rate or "
            "rsa_learning_rate, or leave fp16 out. Earlier checkpoints are intact."
        )
