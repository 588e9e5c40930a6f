"""Run the cells of an experiment, several at a time: small models keep one core busy, and not two."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
import transformers

from rsa_hf.experiments.runner.cells import Cell, Result, Values
from rsa_hf.experiments.runner.machine import machine, versions
from rsa_hf.integration import install

__all__ = ["Workers", "default_jobs", "run_cells"]

RunCell = Callable[[Cell], Values]


def default_jobs() -> int:
    """A process for each core that this one may use; one where there is a GPU."""
    if torch.cuda.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes with an equal share of the cores, for one experiment after the other.

    Each takes seconds to start, and keeps the data and the pretrained models that it has read. A context manager; at
    its end cells that have not begun are dropped, and those that have are waited for.

    Args:
        jobs: how many; 1: no process is started, cells run in this one.

    Raises:
        ValueError: `jobs` is below 1.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"jobs is {jobs}; at least 1 is needed.")
        self.executor: ProcessPoolExecutor | None = None
        if jobs > 1:
            threads = max(1, default_jobs() // jobs)
            self.executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (threads,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)


def run_cells(
    run_cell: RunCell, cells: Mapping[str, Cell], workers: Workers | None = None
) -> Iterator[tuple[str, Result]]:
    """The results by key, each as soon as it is there.

    Args:
        run_cell: of the experiment; with workers a function of a module, which can be sent to a process.
        cells: by key.
        workers: who runs them, a single one being no work to share; None: this process.

    Raises:
        What `run_cell` raises; cells that have not begun are not run then, and those that have are finished first.
    """
    executor = None if workers is None else workers.executor
    if executor is None or len(cells) < 2:
        for key, cell in cells.items():
            yield key, _run(run_cell, cell)
        return
    futures = {executor.submit(_run, run_cell, cell): key for key, cell in cells.items()}
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


def _begin(threads: int) -> None:
    install()  # the command, as which a process is started again, does not do so by itself
    transformers.logging.disable_progress_bar()  # there is one bar, that of the experiment
    torch.set_num_threads(threads)


def _run(run_cell: RunCell, cell: Cell) -> Result:
    start = time.perf_counter()
    values = run_cell(cell)
    return Result(cell, values, time.perf_counter() - start, machine(), versions())
