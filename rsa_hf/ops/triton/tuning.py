"""Block shapes of the kernels: the defaults, and the fastest of a few candidates, which is measured once."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

ROUNDS = 5  # timed runs of each candidate, after one warm-up


class Tuning(NamedTuple):
    """Launch parameters of a kernel."""

    chunk: int  # C, steps per chunk; a power of two, at least 16
    block: int  # channels per program; a power of two, at least 16
    warps: int  # per program
    stages: int  # chunks in flight from memory


def block_of(head_size: int, most: int = 64) -> int:
    """Channels per program: the largest power of two that leaves at most a quarter of them unused."""
    block = most
    while block > 16 and -(-head_size // block) * block > max(1.25 * head_size, 16):
        block //= 2
    return block


def candidates(kernel: str, head_size: int, bits: int) -> list[Tuning]:
    """The candidates for a kernel (`"forward"` or `"backward"`) and values of 16 or 32 bits, the default first."""
    block = block_of(head_size)
    if bits == 32:
        # Rows are twice as wide, and tf32x3 costs three products.
        return [Tuning(32, block, 4, 3), Tuning(32, min(block, 32), 4, 3), Tuning(64, min(block, 32), 4, 2)]
    if kernel == "forward":
        return [Tuning(64, block, 4, 3), Tuning(64, block, 4, 4), Tuning(32, block, 4, 4), Tuning(128, block, 8, 3)]
    # Three tiles, two matrices and two sums: with 64 channels, four warps would run out of registers.
    return [
        Tuning(64, block, 8, 2),
        Tuning(64, min(block, 32), 4, 2),
        Tuning(32, block, 4, 3),
        Tuning(64, block, 8, 3),
    ]


_known: dict[tuple[Any, ...], Tuning] = {}


def fastest(
    question: tuple[Any, ...], options: list[Tuning], run: Callable[[Tuning], Any], device: torch.device
) -> Tuning:
    """The fastest option, measured the first time and remembered by `question`.

    It is the default, without a measurement, if nothing can be measured (in the interpreter, while a stream is
    captured) or if results must be deterministic (`torch.use_deterministic_algorithms`), because the size of the
    chunk decides how sums are rounded.
    """
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return options[0]
    if question in _known:
        return _known[question]
    if torch.cuda.is_current_stream_capturing():
        return options[0]
    times = {option: _time(run, option) for option in options}
    _known[question] = min(times, key=lambda option: times[option])
    return _known[question]


def _time(run: Callable[[Tuning], Any], option: Tuning) -> float:
    """Median milliseconds, infinite if the GPU has too little shared memory."""
    from triton.runtime.errors import OutOfResources

    try:
        run(option)
    except OutOfResources:
        return float("inf")
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(option)
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times)
