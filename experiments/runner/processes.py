"""Run settings in this process or in several: small models keep one core busy, not two."""

import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

import rsa_hf
from experiments.runner.summary import Run, Settings, Values

Measure = Callable[[Settings], Values]


def machine() -> str:
    """Name of the GPU and whether it multiplies float32 in TF32, or of the processor with the number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name() + ", TF32" * (torch.get_float32_matmul_precision() != "highest")
    info, threads = Path("/proc/cpuinfo"), torch.get_num_threads()
    found = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that measured values depend on."""
    packages = {package: version(package) for package in ("torch", "transformers", "numpy")}
    return {"python": platform.python_version(), "rsa_hf": rsa_hf.__version__, **packages}


def default_jobs() -> int:
    """One job per usable core, or one if there is a GPU."""
    if torch.cuda.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers(jobs: int) -> Executor:
    """Processes that share the cores equally, and keep the data that they have read for the next experiment."""
    threads = max(1, default_jobs() // jobs)
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start, (threads,))


def run_all(measure: Measure, grid: Mapping[str, Settings], executor: Executor | None) -> Iterator[tuple[str, Run]]:
    """Run settings, by key, in workers or in this process, and yield each finished run with its key.

    After an exception, runs that have not started are dropped.
    """
    if executor is None or len(grid) < 2:
        for key, settings in grid.items():
            yield key, _run(measure, settings)
        return
    futures = {executor.submit(_run, measure, settings): key for key, settings in grid.items()}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def _start(threads: int) -> None:
    transformers.logging.disable_progress_bar()  # the experiment has a bar of its own
    torch.set_num_threads(threads)


def _run(measure: Measure, settings: Settings) -> Run:
    start = time.perf_counter()
    values = measure(settings)
    return Run(settings, values, time.perf_counter() - start, machine(), versions())
