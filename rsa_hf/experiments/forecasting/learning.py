"""Train a forecaster on mean squared error, and score it."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsa_hf.experiments.forecasting.arms import Task
from rsa_hf.experiments.forecasting.series import Series, windows
from rsa_hf.training.optimizer import param_groups

__all__ = ["learn", "naive_errors", "score"]


def learn(
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
    """Train, and leave the model as it was where its validation error was lowest.

    Adam; the learning rate is halved after each epoch (as in Informer's experiments), gradients are clipped at norm 1.

    Args:
        model: is trained in place.
        series: what it learns from.
        task: the lengths.
        steps: in an epoch.
        epochs: how many.
        batch: windows a step, drawn with replacement.
        learning_rate: of the first epoch; RSA parameters move faster by their `parameter_scale`.
        stride: steps between the windows of the validation part.
        seed: of the windows.

    Returns:
        The mean squared error on the validation part after each epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(param_groups(model, learning_rate, weight_decay=0.0), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    origins = series.origins("train", task.context, task.horizon)
    errors, best, best_state = list[float](), math.inf, model.state_dict()
    for _ in range(epochs):
        model.train()
        for _ in range(steps):
            chosen = origins[torch.randint(len(origins), (batch,), generator=generator)]
            known, target, times = (x.to(device) for x in windows(series, chosen, task.context, task.horizon))
            loss = F.mse_loss(model(known, times), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        errors.append(score(model, series, task, "validation", stride)[0])
        if errors[-1] < best:
            best, best_state = errors[-1], copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    return errors


@torch.no_grad()
def score(
    model: nn.Module, series: Series, task: Task, part: str, stride: int, size: int = 256
) -> tuple[float, float]:
    """Mean squared and mean absolute error over all steps and variables of the windows of a part, standardised."""
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
    """The same on the test part, of the prediction that the last period comes again."""
    origins = series.origins("test", task.context, task.horizon, stride)
    known, target, _ = windows(series, origins, task.context, task.horizon)
    again = known[:, -period:].repeat(1, -(-task.horizon // period), 1)[:, : task.horizon]
    return _errors(again, target)


def _errors(prediction: Tensor, target: Tensor) -> tuple[float, float]:
    difference = prediction - target
    return float(difference.square().mean()), float(difference.abs().mean())
