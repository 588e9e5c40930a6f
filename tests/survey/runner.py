"""Try many types, each in a process of its own: one that hangs or crashes is a line in the table, not the end."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import transformers

from survey.survey import survey_type
from survey.tiny_models import tasks_of

__all__ = ["survey"]


def survey(
    model_types: Sequence[str], jobs: int = 1, seconds_per_type: float = 60, seconds: float = float("inf")
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each type with its record (`survey_type`), in the order they are done.

    Args:
        model_types: the types to try.
        jobs: number of processes at a time, each with one thread.
        seconds_per_type: a type that takes longer is ended, and its tasks are recorded as "not built".
        seconds: no type is begun after that time.
    """
    context = multiprocessing.get_context("fork")  # so that transformers is imported once
    begun, waiting = time.monotonic(), list(model_types)
    running: dict[Connection, tuple[str, Any, float]] = {}
    while running or waiting:
        if time.monotonic() - begun > seconds:
            waiting = []
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_try, args=(name, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic())
        for receiver in wait(list(running), timeout=1):
            name, process, _ = running.pop(receiver)  # type: ignore[index]
            try:
                record = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                record = _gave_up(name, f"its process ended with exit code {process.exitcode}")
            yield name, record
        for receiver, (name, process, start) in list(running.items()):
            if time.monotonic() - start > seconds_per_type:
                process.kill()
                del running[receiver]
                yield name, _gave_up(name, f"it took longer than {seconds_per_type:.0f} seconds")


def _try(model_type: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    sender.send(survey_type(model_type))


def _gave_up(model_type: str, why: str) -> dict[str, Any]:
    return {task: {"outcome": "not built", "why": why} for task in tasks_of(model_type)}
