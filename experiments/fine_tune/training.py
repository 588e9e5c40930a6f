"""Fine-tuning with early stopping."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from experiments.pretrained_tasks import Task
from experiments.runner.fit import adamw_with_linear_decay, batch_loss, evaluation_steps, fit

__all__ = ["fine_tune"]


def fine_tune(
    model: nn.Module, task: Task, *, learning_rate: float, steps: int, batch: int, evaluations: int, seed: int
) -> dict[str, Any]:
    """Train with AdamW and report the test score where validation was best, the start included; less is better.

    Weight decay 0.01 on matrices. The learning rate warms up over a tenth of the steps and falls linearly to 0; RSA
    parameters move faster by their `parameter_scale`. Evaluations are evenly spread, after one before the first step.
    `batch` rows make a step, and `seed` shuffles them.

    Returns:
        The test scores at the best step and before the first one, the best validation score and its step; then the
        validation scores, the first before training, and their steps.
    """
    optimizer, schedule = adamw_with_linear_decay(model, learning_rate, steps)
    marks = evaluation_steps(steps, evaluations)
    start = best_test = task.score(model, "test")
    scores, best_step = {0: task.score(model, "validation")}, 0

    def evaluate(step: int, _: Tensor) -> None:
        nonlocal best_step, best_test
        if step in marks:
            scores[step] = task.score(model, "validation")
            if scores[step] < scores[best_step]:
                best_step, best_test = step, task.score(model, "test")

    loss = batch_loss(model, task.rows, batch, seed, task.collate)
    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=evaluate)
    return {
        task.measure: best_test,
        "before training": start,
        "validation": scores[best_step],
        "best step": float(best_step),
        "steps scored": [float(step) for step in scores],
        "validation scores": [*scores.values()],
    }
