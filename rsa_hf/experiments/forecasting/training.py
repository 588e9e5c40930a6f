"""Train a forecaster on mean squared error, and score it."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsa_hf.experiments.forecasting.models import Task
from rsa_hf.experiments.forecasting.series import Series, windows
from rsa_hf.experiments.runner.fit import fit
from rsa_hf.training.optimizer import param_groups

__all__ = ["naive_errors", "score", "train"]


def train(
    model: nn.Module,
    series: Series,
    task: Task,
    *,
    steps: int,
    epochs: int,
    batch: int,
    learning_rate: float,
    stride: int,
    seed: int,
) -> list[float]:
    """Train with Adam, and restore the weights of the epoch with the lowest validation error.

    The learning rate is halved after each epoch, as in the Informer's experiments.

    Args:
        model: trained in place.
        series: training and validation data.
        task: lengths of the windows.
        steps: steps per epoch.
        epochs: number of epochs.
        batch: windows per step, drawn with replacement.
        learning_rate: of the first epoch; RSA parameters move faster by their `parameter_scale`.
        stride: distance between validation windows.
        seed: draws the windows.

    Returns:
        The mean squared validation error after each epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(param_groups(model, learning_rate, weight_decay=0.0), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // steps))
    origins = series.origins("train", task.context, task.horizon)
    # The live weights: a model that diverges at once is left diverged.
    errors, best, best_state = list[float](), math.inf, model.state_dict()

    def loss(step: int) -> Tensor:
        chosen = origins[torch.randint(len(origins), (batch,), generator=generator)]
        known, target, times = (x.to(device) for x in windows(series, chosen, task.context, task.horizon))
        return F.mse_loss(model(known, times), target)

    def evaluate(step: int, _: Tensor) -> None:
        nonlocal best, best_state
        if step % steps == 0:
            errors.append(score(model, series, task, "validation", stride)[0])
            if errors[-1] < best:
                best, best_state = errors[-1], copy.deepcopy(model.state_dict())

    fit(loss, optimizer, steps * epochs, model=model, schedule=schedule, after_step=evaluate)
    model.load_state_dict(best_state)
    return errors


@torch.no_grad()
def score(
    model: nn.Module, series: Series, task: Task, part: str, stride: int, size: int = 256
) -> tuple[float, float]:
    """Mean squared and mean absolute error over the windows of a part, on standardised data."""
    model.eval()
    device = next(model.parameters()).device
    origins = series.origins(part, task.context, task.horizon, stride)
    squared = absolute = 0.0
    for chosen in origins.split(size):
        known, target, times = (x.to(device) for x in windows(series, chosen, task.context, task.horizon))
        found = _errors(model(known, times), target)
        squared, absolute = squared + found[0] * len(chosen), absolute + found[1] * len(chosen)
    return squared / len(origins), absolute / len(origins)


def naive_errors(series: Series, task: Task, stride: int, period: int) -> tuple[float, float]:
    """Errors on the test part of the forecast that repeats the last period."""
    origins = series.origins("test", task.context, task.horizon, stride)
    known, target, _ = windows(series, origins, task.context, task.horizon)
    again = known[:, -period:].repeat(1, -(-task.horizon // period), 1)[:, : task.horizon]
    return _errors(again, target)


def _errors(prediction: Tensor, target: Tensor) -> tuple[float, float]:
    difference = prediction - target
    return float(difference.square().mean()), float(difference.abs().mean())
