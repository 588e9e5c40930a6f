"""The training loop of both scripts: Accelerate underneath, and exactly resumable."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rsa_hf.report import rsa_report
from rsa_hf.training.carried import Tracks
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

__all__ = ["TrainResult", "TrainingDivergedError", "train"]

logger = logging.getLogger(__name__)

BEST_STEP = "best.json"  # of which step `best/` is, written before it


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        steps: optimiser steps done.
        tokens: input tokens seen, padding not counted.
        final_metrics: the evaluation after the last step.
        best_step: the step with the best evaluation.
        best_metrics: that evaluation.
        best_dir: the model of that step, as `save_pretrained` writes it.
        final_dir: the model after the last step.
    """

    steps: int
    tokens: int
    final_metrics: dict[str, float]
    best_step: int
    best_metrics: dict[str, float]
    best_dir: Path
    final_dir: Path


def train(
    model: PreTrainedModel,
    train_dataset: Examples | Tracks | IterableDataset[Any],
    collate_fn: Callable[[list[Any]], Batch],
    evaluate: Callable[[PreTrainedModel], dict[str, float]],
    training: TrainingSettings,
    *,
    best_metric: str,
    greater_is_better: bool,
    class_weights: Sequence[float] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train a model, patched or plain; evaluate it now and then, and save it.

    A step's gradient is that of the mean loss over all labels, those of −100 left out, of all its micro-batches
    on all processes; so `batch_size=8, gradient_accumulation_steps=2` learns what `batch_size=16` does.

    Args:
        model: its forward takes what `collate_fn` returns, and gives the mean loss over the labels.
        train_dataset: the examples; an epoch takes each once, in an order that depends on seed and epoch. Those of
            an `IterableDataset` are taken in its order, `training.max_steps` says how long, and a run that is
            continued reads past those it has seen. `Tracks` are taken in their order too, and the model carries its
            memory along each of them, through steps and checkpoints, to the end of an epoch.
        collate_fn: makes a batch, with `labels` (of tracks, `shift_labels`), of a list of examples.
        evaluate: returns metrics of the model. Every process calls it, as sharded models need, and the main
            process's figures count. It may switch the model to eval mode.
        training: how to train.
        best_metric: the metric by which the best model is chosen.
        greater_is_better: whether more of it is better.
        class_weights: for classification: the weight of each class in the loss, which is then a weighted mean.
            They are the task's to compute; `training.class_weights` only asks for them.
        tokenizer: saved beside the model.
        settings: all that decides the run, `training` included, as `RunConfig.to_dict` gives it: a checkpoint is
            continued only under the same. None: `training` alone.

    Returns:
        The metrics, and where the models lie.

    Raises:
        StorageError: a full disk, a folder that cannot be written into, or another process that writes into it. What
            was saved before is whole, and the run can be continued from it.
        TrainingDivergedError: the loss or its gradient became NaN or infinite.
        ValueError: no examples, a stream without `max_steps`, tracks for a model that carries nothing or in another
            number than a step has rows, no class weights where they are asked for, a batch without labels, metrics
            without `best_metric`, or a checkpoint that does not fit.
    """
    num_examples = None if isinstance(train_dataset, IterableDataset) else len(train_dataset)
    if num_examples == 0:
        raise ValueError("the training set has 0 examples; at least one is needed.")
    if training.class_weights and class_weights is None:
        raise ValueError("training.class_weights=True, but this task has no classes to weigh; set it to false.")
    # The loop accumulates and counts by itself, so Accelerate must neither divide the loss nor move the schedule.
    accelerator = Accelerator(mixed_precision=training.mixed_precision, step_scheduler_with_optimizer=False)
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
        # Under mixed precision Accelerate wraps the model's forward. Its own unwrap_model would take off the
        # decorators of transformers as well.
        for name in added & vars(model).keys():
            delattr(model, name)


@dataclass
class _Run:
    """The parts of a run, and how they go together."""

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
        """Take all steps that are left."""
        try:
            return self._complete()
        except StorageError as error:
            newest = self.checkpoints.newest()
            kept = "No checkpoint was saved yet." if newest is None else f"{newest} is whole: a run goes on from it."
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
                    if not bar.disable:  # tqdm writes on a disabled bar too
                        bar.write(f"step {progress.step}: {_in_words(progress.metrics)}")
                if evaluates or is_due(training.log_every_steps):
                    epoch = None if steps_per_epoch is None else progress.step / steps_per_epoch
                    self._log(progress, epoch, learning_rate, evaluates)
                if is_due(training.save_every_steps) if training.save_every_steps else evaluates:
                    self.log.flush()
                    self.checkpoints.save(progress, self.stepper.carried)
        if progress.best_step is None:  # a run that had ended, and has lost its best model
            self._evaluate(progress)
        self._save_model(self.output / "final")
        assert progress.best_step is not None  # the last step, if no other, was evaluated
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
                "%s is not the model of step %d, the best one when %s was saved; the best of those to come is kept.",
                *(self.output / "best", progress.best_step, folder),
            )
            progress.best_step, progress.best_metrics = None, {}
        # Those of a course that is given up would be newer than what is saved from here on.
        self.checkpoints.clear(after=progress.step)
        return progress

    def _has_best(self, step: int) -> bool:
        """Whether `best/` is the model of this step: not in another output folder, nor after one that was given up."""
        told = self.output / BEST_STEP
        known = json.loads(told.read_text(encoding="utf-8"))["step"] if told.exists() else step
        shared = [known == step and (self.output / "best").is_dir()]
        broadcast_object_list(shared)  # saving a model takes all processes
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
        broadcast_object_list(shared)  # so that no rounding makes two processes disagree on which model is best
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
        state = self.accelerator.get_state_dict(self.stepper.model)  # of sharded models, every process has a part
        if self.accelerator.is_main_process:
            with written_whole(folder) as temporary:
                self.model.save_pretrained(temporary, state_dict=state)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(temporary)
        self.accelerator.wait_for_everyone()


def _in_words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
