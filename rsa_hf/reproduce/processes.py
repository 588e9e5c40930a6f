"""Run the cells of an experiment, several at a time: small models keep one core busy, and not two."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from rsa_hf.arming import arm
from rsa_hf.reproduce.cells import Cell, Result, Values
from rsa_hf.reproduce.machine import machine

__all__ = ["default_jobs", "run_cells"]

RunCell = Callable[[Cell], Values]


def default_jobs() -> int:
    """A process for each core that this one may use; one where there is a GPU."""
    if torch.cuda.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_cells(run_cell: RunCell, cells: Mapping[str, Cell], jobs: int) -> Iterator[tuple[str, Result]]:
    """The results by key, each as soon as it is there.

    Args:
        run_cell: of the experiment; with more than one job a function of a module, which can be sent to a process.
        cells: by key.
        jobs: how many run at a time: 1 in this process, more in processes with an equal share of the cores.

    Raises:
        What `run_cell` raises; cells that have not begun are not run then.
    """
    if jobs == 1 or len(cells) < 2:
        for key, cell in cells.items():
            yield key, _run(run_cell, cell)
        return
    threads = max(1, default_jobs() // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _begin, (threads,)) as executor:
        futures = {executor.submit(_run, run_cell, cell): key for key, cell in cells.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            executor.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    arm()  # the command, as which a process is started again, does not do so by itself
    torch.set_num_threads(threads)


def _run(run_cell: RunCell, cell: Cell) -> Result:
    start = time.perf_counter()
    values = run_cell(cell)
    return Result(cell, values, time.perf_counter() - start, machine())
