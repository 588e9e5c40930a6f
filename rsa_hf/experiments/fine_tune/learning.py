"""Fine-tuning with early stopping: the same for every arm and both kinds of tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from rsa_hf.training.optimizer import param_groups

__all__ = ["Scores", "Task", "fine_tune"]


@dataclass(frozen=True)
class Task:
    """What a model is trained on, and how it is scored.

    Attributes:
        measure: the name of the score.
        higher_is_better: which way it counts.
        rows: the training rows, indexed from 0.
        join: makes a batch of a list of rows.
        validation: scores a model on what decides when to stop.
        test: scores a model on what the result is.
    """

    measure: str
    higher_is_better: bool
    rows: Any
    join: Callable[[list[Any]], Any]
    validation: Callable[[Any], float]
    test: Callable[[Any], float]


@dataclass(frozen=True)
class Scores:
    """What came of a run.

    Attributes:
        steps: after how many steps it was scored, 0 first.
        validation: the scores then.
        start: the test score before the first step.
        test: the test score at the step whose validation score is best.
        best_step: that step.
    """

    steps: list[float]
    validation: list[float]
    start: float
    test: float
    best_step: int

    @property
    def best_validation(self) -> float:
        """The validation score at `best_step`."""
        return self.validation[self.steps.index(self.best_step)]


def fine_tune(
    model: nn.Module, task: Task, *, learning_rate: float, steps: int, batch: int, evaluations: int, seed: int
) -> Scores:
    """Train by AdamW, and keep the test score of where validation was best, the start included.

    Weight decay 0.01 on matrices, gradients clipped at norm 1; the learning rate rises for a tenth of the steps and
    falls to 0 linearly. Rows come in an order that `seed` shuffles, anew for each pass.

    Args:
        model: is trained in place.
        task: what on.
        learning_rate: of the weights; RSA parameters move faster by their `parameter_scale`.
        steps: in all.
        batch: rows a step.
        evaluations: how many times it is scored on the way, evenly spread, the last at the end.
        seed: of the order.
    """
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate, weight_decay=0.01))
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    marks = {round(steps * (i + 1) / evaluations) for i in range(evaluations)}
    order: list[int] = []
    start = best_test = task.test(model)
    scored, best_step = {0: task.validation(model)}, 0
    sign = 1 if task.higher_is_better else -1
    for step in range(1, steps + 1):
        model.train()
        while len(order) < batch:
            order += torch.randperm(len(task.rows), generator=generator).tolist()
        inputs = task.join([task.rows[i] for i in order[:batch]])
        del order[:batch]
        model(**{name: value.to(device) for name, value in inputs.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step in marks:
            scored[step] = task.validation(model)
            if sign * scored[step] > sign * scored[best_step]:
                best_step, best_test = step, task.test(model)
    return Scores([float(step) for step in scored], [*scored.values()], start, best_test, best_step)
