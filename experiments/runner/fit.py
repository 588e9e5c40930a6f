"""The training loop of all experiments, and the measurement of step times."""

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate
from transformers import get_scheduler

from experiments.runner.summary import worst_if_nan
from rsa_hf import param_groups

ROUNDS = 7  # of timing; an odd number, so that the median is one of them


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fit(
    loss: Callable[[int], Tensor],
    optimizer: Optimizer,
    steps: int,
    *,
    model: nn.Module | None = None,
    schedule: LRScheduler | None = None,
    after_step: Callable[[int, Tensor], bool | None] | None = None,
) -> int:
    """Train, and return the number of steps taken.

    Args:
        loss: step, counted from 1 → the loss of its batch.
        optimizer: holds the parameters.
        steps: at most.
        model: set to training mode before each step, and its gradient clipped at norm 1.
        schedule: advanced after each step.
        after_step: gets the step and the detached loss, to evaluate or record; training ends if it returns True.
    """
    for step in range(1, steps + 1):
        if model is not None:
            model.train()
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        if model is not None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if after_step is not None and after_step(step, value.detach()):
            return step
    return steps


class BestWeights:
    """The scores of a model at its evaluations, of which lower is better, and its weights at the best one."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.scores, self._weights = model, list[float](), dict[str, Any]()

    def add(self, score: float) -> int:
        """Take the weights if this score is the lowest, and finite; the number of evaluations since the lowest one."""
        self.scores.append(score)
        known = [worst_if_nan(each) for each in self.scores]
        since = len(known) - 1 - known.index(min(known))
        if since == 0 and math.isfinite(score):
            self._weights = copy.deepcopy(self.model.state_dict())
        return since

    def restore(self) -> float:
        """The lowest score, and its weights into the model; NaN, and the last weights, if none was finite."""
        if self._weights:
            self.model.load_state_dict(self._weights)
        return min(filter(math.isfinite, self.scores), default=math.nan)


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW, weight decay 0.01 on matrices."""
    return torch.optim.AdamW(param_groups(model, learning_rate, weight_decay=0.01), fused=True)


def adamw_linear_decay(model: nn.Module, learning_rate: float, steps: int) -> tuple[Optimizer, LRScheduler]:
    """AdamW, weight decay 0.01 on matrices; the learning rate warms up over a tenth of the steps and falls to 0."""
    optimizer = adamw(model, learning_rate)
    return optimizer, get_scheduler("linear", optimizer, max(1, steps // 10), steps)


def batch_loss(
    model: nn.Module, rows: Any, batch: int, seed: int, collate: Callable[[list[Any]], Any] = default_collate
) -> Callable[[int], Tensor]:
    """The loss for `fit` of a model that returns one, on batches of shuffled rows."""
    order, device = shuffled_rows(len(rows), batch, seed), next(model.parameters()).device

    def loss(step: int) -> Tensor:
        inputs = collate([rows[i] for i in next(order)])
        value: Tensor = model(**{name: tensor.to(device) for name, tensor in inputs.items()}).loss
        return value

    return loss


def shuffled_rows(count: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Row indices of one batch after another, without end; rows are shuffled again for each pass over the data."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < batch:
            order += torch.randperm(count, generator=generator).tolist()
        yield order[:batch]
        del order[:batch]


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """Steps after which to evaluate: evenly spread, the last one at the end."""
    return {round(steps * (i + 1) / evaluations) for i in range(evaluations)}


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, trained or not."""
    return sum(parameter.numel() for parameter in model.parameters())


def step_time_ratio(model: nn.Module, other: nn.Module, input_ids: Tensor) -> float:
    """Time of a forward and backward pass of a language model relative to another: the median of seven rounds.

    The models take turns, so that other load on the machine affects both. A warm-up round is not counted.
    """
    times = [(_step_time(model, input_ids), _step_time(other, input_ids)) for _ in range(1 + ROUNDS)]
    return statistics.median(first / second for first, second in times[1:])


def _step_time(model: nn.Module, input_ids: Tensor) -> float:
    model.train()
    start = time.perf_counter()
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds
