"""How the benchmarks measure: interleaved timing, peak memory, what machine it was, and how they write."""

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import rsa_hf

CPU_INFO = Path("/proc/cpuinfo")


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, threads, versions and commit, for the head of a table."""
    about = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    models = re.findall(r"^model name\s*: (.+)$", about, flags=re.MULTILINE)
    found = {
        "processor": models[0] if models else platform.processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rsa_hf": rsa_hf.__version__,
        "commit": _commit(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def interleaved(
    arms: dict[str, Callable[[], Any]], rounds: int, device: torch.device, patience: float = float("inf")
) -> dict[str, dict[str, Any]]:
    """Time every arm once in every round, after a round that does not count.

    Args:
        arms: what to time, by name.
        rounds: how often.
        device: what has to be waited for.
        patience: seconds after which an arm takes no part in further rounds, if it had five.

    Returns:
        For each arm the median, the first and the third quartile, in milliseconds, and the time of every round.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for counted in range(-1, rounds):
        for name, run in arms.items():
            if len(times[name]) >= 5 and sum(times[name]) > 1000 * patience:
                continue
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            if counted >= 0:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: {**spread(values), "rounds": values} for name, values in times.items()}


def throughput(device: torch.device) -> dict[str, float]:
    """What the machine can do: copying 256 MB, in GB/s read and written, and a product of matrices, in GFLOP/s."""
    n = 2048
    source = torch.ones(2**26, device=device)
    target, a, b = torch.empty_like(source), torch.ones(n, n, device=device), torch.ones(n, n, device=device)
    times = interleaved({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, 11, device)
    return {
        "copy_gb_per_s": 2 * source.numel() * source.element_size() / times["copy"]["median"] / 1e6,
        "matrix_gflop_per_s": 2 * n**3 / times["product"]["median"] / 1e6,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return {"median": median, "low": low, "high": high}


def ratio(times: dict[str, dict[str, Any]], arm: str, rival: str) -> float | None:
    """How much longer an arm takes than its rival: the median over rounds of the ratio within a round."""
    found = ratio_spread(times, arm, rival)
    return None if found is None else found["median"]


def ratio_spread(times: dict[str, dict[str, Any]], arm: str, rival: str) -> dict[str, float] | None:
    """Median and quartiles over rounds of the ratio within a round; None if one of the two was not timed.

    The speed of a shared machine drifts by more than most differences between arms. Within a round it drifts least.
    """
    if arm not in times or rival not in times:
        return None
    # An arm that took too long has fewer rounds; they are the first ones.
    return spread([a / b for a, b in zip(times[arm]["rounds"], times[rival]["rounds"], strict=False)])


def peak_memory(run: Callable[[], Any]) -> float:
    """Megabytes of tensors that a call holds at its peak, beyond those from before it.

    On a CPU these are the allocations and releases that the profiler records. The resident memory of the process says
    less: it depends on what the allocator has kept from earlier calls.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run()  # held, as what a training step holds
        del kept
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    del kept
    with TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(itertools.accumulate(size for _, size in changes)) / 1e6


def make_parser(about: str | None, output: str = "--output") -> argparse.ArgumentParser:
    """The parser of a benchmark, with the folder of its results."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(output, type=Path, default=Path("results"), help="folder of the results")
    return parser


def on(head: dict[str, Any]) -> str:
    """The machine in the first line of a page."""
    return f"{head.get('gpu', head['processor'])}, {head['threads']} threads, torch {head['torch']}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0].replace("|  |", "| |"), "|" + "---|" * len(header), *lines[1:]]


def write(path: Path, text: str) -> None:
    """Write a file whole: a run that ends meanwhile leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def publish(output: Path, name: str, record: dict[str, Any], lines: Sequence[str]) -> None:
    """Write name.json and name.md, and print the page."""
    text = "\n".join(lines) + "\n"
    write(output / f"{name}.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    write(output / f"{name}.md", text)
    print(text)
