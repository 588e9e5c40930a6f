"""Run several settings at a time in worker processes: small models keep one core busy, not two."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
import transformers

from rsa_hf.experiments.runner.machine import machine, versions
from rsa_hf.experiments.runner.summary import Run, Settings, Values
from rsa_hf.integration import install

__all__ = ["Workers", "default_jobs", "run_all"]

Measure = Callable[[Settings], Values]


def default_jobs() -> int:
    """One job per usable core, or one if there is a GPU."""
    if torch.cuda.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Worker processes that share the cores equally and serve one experiment after another.

    A worker takes seconds to start and keeps the data and pretrained models that it has read. Use it as a context
    manager: on exit, runs that have not started are dropped and running ones are waited for.

    Args:
        jobs: number of processes; 1: runs happen in this process.

    Raises:
        ValueError: `jobs` is below 1.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"jobs={jobs}: at least 1 is needed.")
        self.executor: ProcessPoolExecutor | None = None
        if jobs > 1:
            threads = max(1, default_jobs() // jobs)
            self.executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start, (threads,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)


def run_all(
    measure: Measure, grid: Mapping[str, Settings], workers: Workers | None = None
) -> Iterator[tuple[str, Run]]:
    """Run settings and yield each finished run with its key.

    Args:
        measure: `Experiment.measure`; with workers it must be picklable.
        grid: settings by key.
        workers: None, or a single run to do: run in this process.

    Raises:
        The first exception of `measure`, after the runs that had started have finished and been yielded.
    """
    executor = None if workers is None else workers.executor
    if executor is None or len(grid) < 2:
        for key, settings in grid.items():
            yield key, _run(measure, settings)
        return
    futures = {executor.submit(_run, measure, settings): key for key, settings in grid.items()}
    failed = None
    try:
        for future in as_completed(futures):
            if future.cancelled():
                continue
            if future.exception() is None:
                yield futures[future], future.result()
            elif failed is None:
                failed = future
                for other in futures:
                    other.cancel()
        if failed is not None:
            failed.result()
    finally:
        for future in futures:
            future.cancel()


def _start(threads: int) -> None:
    install()  # a worker starts as the rsa-hf command, which does not install the hooks by itself
    transformers.logging.disable_progress_bar()  # the experiment has a bar of its own
    torch.set_num_threads(threads)


def _run(measure: Measure, settings: Settings) -> Run:
    start = time.perf_counter()
    values = measure(settings)
    return Run(settings, values, time.perf_counter() - start, machine(), versions())
