"""The training loop on Accelerate. A resumed run gives bitwise the results of an uninterrupted one."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rsa_hf.report import rsa_report
from rsa_hf.training.carried import ParallelStreams
from rsa_hf.training.checkpoints import CheckpointFolder, Progress
from rsa_hf.training.metrics_log import MetricsLog
from rsa_hf.training.settings import TrainingSettings
from rsa_hf.training.steps import (
    Batch,
    Examples,
    Stepper,
    TrainingDivergedError,
    checkpointed_activations,
)
from rsa_hf.utils.files import StorageError, recover, sole_writer, storage_errors, write_text, written_whole

__all__ = ["TrainResult", "TrainingDivergedError", "make_accelerator", "train"]

logger = logging.getLogger(__name__)

BEST_STEP = "best.json"  # the step of `best/`, written before it


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        steps: optimiser steps done.
        tokens: input tokens seen, without padding.
        final_metrics: results of the evaluation after the last step.
        best_step: step with the best evaluation.
        best_metrics: results of the best evaluation.
        best_dir: folder of the model of that step, written by `save_pretrained`.
        final_dir: folder of the model after the last step.
    """

    steps: int
    tokens: int
    final_metrics: dict[str, float]
    best_step: int
    best_metrics: dict[str, float]
    best_dir: Path
    final_dir: Path


def make_accelerator(mixed_precision: str) -> Accelerator:
    """The Accelerator of a run.

    Args:
        mixed_precision: "no", "bf16" or "fp16".
    """
    return Accelerator(
        mixed_precision=mixed_precision,
        # Without this, each of several processes on a machine without a GPU trains alone and overwrites the others.
        cpu=not torch.accelerator.is_available(),
        # The loop accumulates gradients itself, and steps the schedule once per optimiser step.
        step_scheduler_with_optimizer=False,
    )


def train(
    model: PreTrainedModel,
    train_dataset: Examples | ParallelStreams | IterableDataset[Any],
    collate_fn: Callable[[list[Any]], Batch],
    evaluate: Callable[[PreTrainedModel], dict[str, float]],
    training: TrainingSettings,
    *,
    best_metric: str,
    greater_is_better: bool,
    class_weights: Sequence[float] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: Mapping[str, Any] | None = None,
    accelerator: Accelerator | None = None,
) -> TrainResult:
    """Train a model, patched or plain, with evaluation, checkpoints and logging.

    The gradient of a step is that of the mean loss over all labels except −100, over all micro-batches and processes:
    `batch_size=8, gradient_accumulation_steps=2` learns what `batch_size=16` does.

    Args:
        model: its forward takes what `collate_fn` returns, and returns the mean loss over the labels.
        train_dataset: the examples. A data set with a length is read once per epoch, in an order that depends on seed
            and epoch. An `IterableDataset` is read in its order and needs `training.max_steps`; a resumed run skips
            what it has seen. `ParallelStreams` are read in their order too, and the model carries its memory along
            each of them, across steps and checkpoints, until the epoch ends.
        collate_fn: makes a batch of a list of examples, with `labels` (`shift_labels` for parallel streams).
        evaluate: returns metrics of the model. Every process calls it, as sharded models require, and the main
            process's result is used. It may switch the model to evaluation mode.
        training: how to train.
        best_metric: the metric that decides which model is best.
        greater_is_better: whether a higher value of it is better.
        class_weights: for classification, the weight of each class in the loss. The task computes them;
            `training.class_weights` only asks for them.
        tokenizer: saved with the model.
        settings: all settings of the run, as `RunConfig.to_dict` returns them. A checkpoint is only resumed under the
            same settings. Default: those of `training`.
        accelerator: as `make_accelerator` makes it; default: a new one.

    Returns:
        The metrics and the folders of the models.

    Raises:
        StorageError: a full disk, a folder that cannot be written, or another process that writes into it. Earlier
            checkpoints are intact, and the run can continue from them.
        TrainingDivergedError: the loss or its gradient became NaN or infinite.
        ValueError: the data, `evaluate`, the model or a checkpoint does not fit the settings.
    """
    num_examples = None if isinstance(train_dataset, IterableDataset) else len(train_dataset)
    if num_examples == 0:
        raise ValueError("the training set has 0 examples; at least one is needed.")
    if training.class_weights and class_weights is None:
        raise ValueError("training.class_weights=True, but this task has no classes to weigh; set it to false.")
    accelerator = make_accelerator(training.mixed_precision) if accelerator is None else accelerator
    settings = {
        **(settings or {"training": asdict(training)}),
        "num_processes": accelerator.num_processes,
        "num_train_examples": num_examples,
    }
    output = Path(training.output_dir)
    checkpoints = CheckpointFolder(output / "checkpoints", settings, accelerator)
    added = {"forward", "_original_forward"} - vars(model).keys()
    try:
        with checkpointed_activations(model, training.gradient_checkpointing):
            stepper = Stepper(accelerator, model, train_dataset, collate_fn, training, class_weights)
            with sole_writer(output) if accelerator.is_main_process else nullcontext():
                run = _Run(model, stepper, checkpoints, training, evaluate, best_metric, greater_is_better, tokenizer)
                return run.complete()
    finally:
        # Under mixed precision Accelerate wraps the model's forward. Its unwrap_model would also remove transformers'
        # decorators.
        for name in added & vars(model).keys():
            delattr(model, name)


@dataclass
class _Run:
    """A run: its parts and the loop over its steps."""

    model: PreTrainedModel
    stepper: Stepper
    checkpoints: CheckpointFolder
    training: TrainingSettings
    evaluate: Callable[[PreTrainedModel], dict[str, float]]
    best_metric: str
    greater_is_better: bool
    tokenizer: PreTrainedTokenizerBase | None

    def __post_init__(self) -> None:
        self.accelerator = self.stepper.accelerator
        self.output = Path(self.training.output_dir)
        self.log = MetricsLog(self.output / "metrics.jsonl", writes=self.accelerator.is_main_process)

    def complete(self) -> TrainResult:
        """Take all remaining steps."""
        try:
            return self._complete()
        except StorageError as error:
            newest = self.checkpoints.newest()
            kept = "No checkpoint was saved yet." if newest is None else f"The run can continue from {newest}."
            raise StorageError(f"{error} {kept}") from error

    def _complete(self) -> TrainResult:
        training, total = self.training, self.stepper.total_steps
        steps_per_epoch = self.stepper.steps_per_epoch

        def is_due(every: int) -> bool:
            return progress.step % every == 0 or progress.step == total

        progress = self._restore()
        self.log.keep_until(progress.step)
        self.model.train()
        with tqdm(
            total=total,
            initial=progress.step,
            desc="training",
            unit="step",
            disable=not self.accelerator.is_main_process,
        ) as bar:
            while progress.step < total:
                learning_rate = self.stepper.learning_rate()
                loss, tokens = self.stepper.step(progress.step)
                progress.step += 1
                progress.tokens += tokens
                progress.losses.append(loss)
                bar.set_postfix(loss=f"{loss:.4f}", lr=f"{learning_rate:.2e}", refresh=False)
                bar.update()
                evaluates = is_due(training.eval_every_steps or steps_per_epoch or total)
                if evaluates:
                    self._evaluate(progress)
                    if not bar.disable:  # a disabled bar writes too
                        bar.write(f"step {progress.step}: {_in_words(progress.metrics)}")
                if evaluates or is_due(training.log_every_steps):
                    epoch = None if steps_per_epoch is None else progress.step / steps_per_epoch
                    self._log(progress, epoch, learning_rate, evaluates)
                if is_due(training.save_every_steps) if training.save_every_steps else evaluates:
                    self.log.flush()
                    self.checkpoints.save(progress, self.stepper.carried)
        if progress.best_step is None:  # a finished run whose best model was deleted
            self._evaluate(progress)
        self._save_model(self.output / "final")
        assert progress.best_step is not None  # the last step is always evaluated
        return TrainResult(
            steps=progress.step,
            tokens=progress.tokens,
            final_metrics=progress.metrics,
            best_step=progress.best_step,
            best_metrics=progress.best_metrics,
            best_dir=self.output / "best",
            final_dir=self.output / "final",
        )

    def _restore(self) -> Progress:
        if self.accelerator.is_main_process:
            with storage_errors(self.output):
                recover(self.output / "best")
                recover(self.output / "final")
        self.checkpoints.recover()
        if self.training.resume == "never":
            self.checkpoints.clear()
            return Progress()
        auto = self.training.resume == "auto"
        folder = self.checkpoints.newest() if auto else Path(self.training.resume)
        progress = Progress() if folder is None else self.checkpoints.load(folder, self.stepper.carried)
        if progress.best_step is not None and not self._has_best(progress.best_step):
            logger.warning(
                "%s is not the model of step %d, the best when %s was saved; the best from now on will be kept.",
                *(self.output / "best", progress.best_step, folder),
            )
            progress.best_step, progress.best_metrics = None, {}
        self.checkpoints.clear(after=progress.step)
        return progress

    def _has_best(self, step: int) -> bool:
        """Whether `best/` is the model of this step. It is not in a new folder, or if a later step wrote it."""
        told = self.output / BEST_STEP
        known = json.loads(told.read_text(encoding="utf-8"))["step"] if told.exists() else step
        shared = [known == step and (self.output / "best").is_dir()]
        broadcast_object_list(shared)  # all processes have to agree, as they save models together
        return shared[0]

    def _log(self, progress: Progress, epoch: float | None, learning_rate: float, evaluated: bool) -> None:
        record = {
            "step": progress.step,
            "epoch": epoch,
            "loss": sum(progress.losses) / len(progress.losses),
            "learning_rate": learning_rate,
            "tokens": progress.tokens,
        }
        self.log.append({**record, "eval": progress.metrics} if evaluated else record, rsa_report(self.model))
        progress.losses = []

    def _evaluate(self, progress: Progress) -> None:
        shared = [self.evaluate(self.model)]
        broadcast_object_list(shared)  # all processes have to agree on the best model
        progress.metrics = shared[0]
        self.model.train()
        if self.best_metric not in progress.metrics:
            raise ValueError(f"evaluate returned {', '.join(progress.metrics)}, but no {self.best_metric!r}.")
        if progress.best_step is None or self._is_better(progress.metrics, progress.best_metrics):
            progress.best_step, progress.best_metrics = progress.step, progress.metrics
            if self.accelerator.is_main_process:
                write_text(self.output / BEST_STEP, json.dumps({"step": progress.step}) + "\n")
            self._save_model(self.output / "best")

    def _is_better(self, metrics: dict[str, float], best: dict[str, float]) -> bool:
        value, known = metrics[self.best_metric], best[self.best_metric]
        if math.isnan(value) or math.isnan(known):
            return math.isnan(known) and not math.isnan(value)
        return value > known if self.greater_is_better else value < known

    def _save_model(self, folder: Path) -> None:
        state = self.accelerator.get_state_dict(self.stepper.model)  # gathers the shards of all processes
        if self.accelerator.is_main_process:
            with written_whole(folder) as temporary:
                self.model.save_pretrained(temporary, state_dict=state)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(temporary)
        self.accelerator.wait_for_everyone()


def _in_words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
