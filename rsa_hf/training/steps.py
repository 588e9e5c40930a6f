"""One optimiser step: its examples, and a gradient independent of processes and micro-batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, get_scheduler

from rsa_hf.training.arguments import TrainingSettings
from rsa_hf.training.carried import CarriedState, ParallelTracks
from rsa_hf.training.fsdp import shard_rsa_heads
from rsa_hf.training.optimizer import param_groups

__all__ = ["Batch", "Examples", "StepExamples", "Stepper", "TrainingDivergedError"]

IGNORED_LABEL = -100  # ignored by transformers' losses

Batch = Mapping[str, Tensor]


class Examples(Protocol):
    """A data set with a length and random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class TrainingDivergedError(RuntimeError):
    """The loss or its gradient became NaN or infinite."""


class StepExamples:
    """The examples of each step. Every epoch has each example once; its last step may have fewer.

    A step's examples depend on neither the number of processes nor earlier steps, so that a run can continue at any
    step. A stream is read by every process, and examples before the first step asked for are skipped.

    Args:
        dataset: the training examples.
        batch_size: examples per process and micro-batch.
        accumulation: micro-batches per step.
        num_processes: number of processes that share a step.
        process_index: index of this process.
        seed: with the epoch, it decides the order of a data set with a length; None: the data set's order.
    """

    def __init__(
        self,
        dataset: Examples | IterableDataset[Any],
        batch_size: int,
        accumulation: int,
        num_processes: int,
        process_index: int,
        seed: int | None,
    ) -> None:
        self.batch_size = batch_size
        self.per_step = batch_size * accumulation * num_processes
        self.num_processes = num_processes
        self.process_index = process_index
        self.seed = seed
        self._dataset: Any = dataset
        self.steps_per_epoch: int | None = None
        if isinstance(dataset, IterableDataset):
            self._stream = _steps_of(dataset, self.per_step)
            self._next = 0  # the step that the stream is at
        else:
            self.steps_per_epoch = math.ceil(len(dataset) / self.per_step)
            self._epoch = -1
            self._order: list[int] = []

    def __call__(self, step: int) -> tuple[list[list[Any]], bool]:
        """This process's micro-batches of a step, counted from 0, and whether they count.

        All processes have to take part in a step. Where an epoch ends with fewer examples than processes, some
        processes get an example that does not count. Steps of a stream can only be asked for in order.
        """
        if self.steps_per_epoch is None:
            taken = next(islice(self._stream, step - self._next, None))
            self._next = step + 1
        else:
            taken = self._indices(*divmod(step, self.steps_per_epoch))
        mine = taken[self.process_index :: self.num_processes]
        counts = bool(mine)
        mine = mine or taken[:1]
        if self.steps_per_epoch is not None:
            mine = [self._dataset[i] for i in mine]
        return [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)], counts

    def _indices(self, epoch: int, position: int) -> list[int]:
        if epoch != self._epoch:
            self._order = list(range(len(self._dataset)))
            if self.seed is not None:
                # A string: with consecutive integers, epoch 1 of seed 0 would have the order of epoch 0 of seed 1.
                random.Random(f"{self.seed}, epoch {epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[position * self.per_step : (position + 1) * self.per_step]


def _steps_of(stream: Iterable[Any], per_step: int) -> Iterator[list[Any]]:
    """The examples of each step, epoch after epoch without end."""
    while True:
        examples = iter(stream)
        taken = list(islice(examples, per_step))
        if not taken:
            raise ValueError("the training set has 0 examples; at least one is needed.")
        while taken:
            yield taken
            taken = list(islice(examples, per_step))


class Stepper:
    """A model with its optimiser and learning-rate schedule.

    Args:
        accelerator: as `make_accelerator` makes it.
        model: the model, which is moved to the accelerator's device.
        dataset: the training examples, as for `train`.
        collate_fn: makes a batch of a list of examples.
        training: how to train.
        class_weights: the weight of each class in the loss.

    Attributes:
        carried: the state of parallel tracks between steps; None for other data.
        steps_per_epoch: None for a stream.
        total_steps: of the whole run.

    Raises:
        ValueError: a stream without `max_steps`; parallel tracks for a model without a state, or more or fewer of
            them than a step has rows.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PreTrainedModel,
        dataset: Examples | ParallelTracks | IterableDataset[Any],
        collate_fn: Callable[[list[Any]], Batch],
        training: TrainingSettings,
        class_weights: Sequence[float] | None,
    ) -> None:
        self.accelerator = accelerator
        self.collate_fn = collate_fn
        self.training = training
        self.class_weights = None if class_weights is None else torch.tensor(class_weights, device="cpu")
        self.carried = CarriedState(model) if isinstance(dataset, ParallelTracks) else None
        self._examples = StepExamples(
            dataset,
            training.batch_size,
            training.gradient_accumulation_steps,
            accelerator.num_processes,
            accelerator.process_index,
            None if self.carried else training.seed,
        )
        if isinstance(dataset, ParallelTracks) and dataset.num_tracks != self._examples.per_step:
            raise ValueError(
                f"the data has {dataset.num_tracks} tracks, but a step takes {self._examples.per_step} rows "
                f"({training.batch_size} in each of {training.gradient_accumulation_steps} micro-batches on each "
                f"of {accelerator.num_processes} processes). Cut it into that many tracks."
            )
        self.steps_per_epoch = self._examples.steps_per_epoch
        if training.max_steps is not None:
            self.total_steps = training.max_steps
        elif self.steps_per_epoch is not None:
            self.total_steps = math.ceil(training.epochs * self.steps_per_epoch)
        else:
            raise ValueError("training.max_steps=None, but a stream has no length: set max_steps, not epochs.")
        set_seed(training.seed, device_specific=True)
        if accelerator.is_fsdp2:
            shard_rsa_heads(model, accelerator)
        groups = param_groups(model, training.learning_rate, training.weight_decay, training.rsa_learning_rate)
        optimizer = torch.optim.AdamW(groups)
        scheduler = get_scheduler(
            "constant_with_warmup" if training.lr_schedule == "constant" else training.lr_schedule,
            optimizer,
            num_warmup_steps=math.ceil(training.warmup_ratio * self.total_steps),
            num_training_steps=self.total_steps,
        )
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(self, step: int) -> tuple[float, int]:
        """Take one optimiser step.

        The gradient is that of the mean loss over all items of the step: each micro-batch's mean loss is weighted by
        its share of the items.

        Args:
            step: index of the step, counted from 0.

        Returns:
            The mean loss over the step's items, and the number of input tokens without padding.

        Raises:
            TrainingDivergedError: the loss or its gradient is NaN or infinite. The weights are unchanged.
            ValueError: a batch without labels.
        """
        if self.carried is not None and self.steps_per_epoch and step % self.steps_per_epoch == 0:
            self.carried.reset()
        micro_batches, counts = self._examples(step)
        batches = [self.collate_fn(examples) for examples in micro_batches]
        items = [self._count_items(batch) if counts else 0.0 for batch in batches]
        tokens = sum(_count_tokens(batch) for batch in batches) if counts else 0
        total, all_tokens = self._sum_over_processes(sum(items), tokens)
        if total == 0:
            raise ValueError(
                f"the examples of step {step + 1} have no label other than {IGNORED_LABEL}: nothing to learn from."
            )
        processes = self.accelerator.num_processes
        loss_here = 0.0
        for i, (batch, count) in enumerate(zip(batches, items, strict=True)):
            # Gradients are synchronised once a step, in the last backward pass.
            last = i == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss = self._mean_loss(send_to_device(batch, self.accelerator.device), i)
                # Synchronisation averages over processes; times their number, it sums.
                self.accelerator.backward(loss * (count / total * processes))
            loss_here += loss.item() * (count / total)
        (loss_of_step,) = self._sum_over_processes(loss_here)
        self._require_finite("loss", loss_of_step, step)
        limit = math.inf if self.training.max_grad_norm is None else self.training.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        if self.accelerator.scaler is None:  # a scaler skips such steps itself; they are normal at its first scales
            self._require_finite("norm of the gradient", float(norm), step)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss_of_step, int(all_tokens)

    def learning_rate(self) -> float:
        """The first parameter group's learning rate in the next step: that of the weights, where they are trained."""
        return float(self.scheduler.get_last_lr()[0])

    def _require_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            self.optimizer.zero_grad()
            raise TrainingDivergedError(
                f"the {what} is {value} at step {step + 1}. Lower training.learning_rate (now "
                f"{self.training.learning_rate:g}) or training.rsa_learning_rate, or set mixed_precision "
                "to 'no'. The checkpoints of earlier steps are intact."
            )

    def _count_items(self, batch: Batch) -> float:
        labels = batch["labels" if self.carried is None else "shift_labels"]
        labels = labels[labels != IGNORED_LABEL]
        return labels.numel() if self.class_weights is None else self.class_weights[labels].sum().item()

    def _mean_loss(self, batch: Batch, micro_batch: int) -> Tensor:
        if self.carried is not None:
            return self.carried.mean_loss(self.model, batch, micro_batch)
        if self.class_weights is None:
            loss: Tensor = self.model(**batch).loss
            return loss
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.model(**inputs).logits.float()
        return cross_entropy(logits, batch["labels"], weight=self.class_weights.to(logits))

    def _sum_over_processes(self, *values: float) -> list[float]:
        if self.accelerator.num_processes == 1:
            return list(values)
        summed = self.accelerator.reduce(
            torch.tensor(values, dtype=torch.float64, device=self.accelerator.device), "sum"
        )
        return [float(value) for value in summed]


def _count_tokens(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())
