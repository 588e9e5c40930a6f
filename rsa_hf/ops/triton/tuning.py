"""Block shapes of the kernels: the defaults, and the fastest of a few where there is time to try them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Tuning", "block_of", "candidates", "fastest"]

ROUNDS = 5  # of each candidate, after one that does not count


class Tuning(NamedTuple):
    """How a kernel is launched.

    Attributes:
        chunk: C, steps of a chunk; a power of two, 16 at least.
        block: channels of a program; a power of two, 16 at least.
        warps: of a program.
        stages: how many chunks are on their way from memory.
    """

    chunk: int
    block: int
    warps: int
    stages: int


def block_of(head_size: int, most: int = 64) -> int:
    """Channels of a program: the widest power of two that leaves at most a quarter of the channels empty."""
    block = most
    while block > 16 and -(-head_size // block) * block > max(1.25 * head_size, 16):
        block //= 2
    return block


def candidates(kernel: str, head_size: int, bits: int) -> list[Tuning]:
    """What is tried, the default first.

    Args:
        kernel: `"forward"` or `"backward"`.
        head_size: D.
        bits: of a value, 16 or 32.
    """
    block = block_of(head_size)
    if bits == 32:
        # Rows are twice as wide, and tf32x3 costs three products.
        return [Tuning(32, block, 4, 3), Tuning(32, min(block, 32), 4, 3), Tuning(64, min(block, 32), 4, 2)]
    if kernel == "forward":
        return [Tuning(64, block, 4, 3), Tuning(64, block, 4, 4), Tuning(32, block, 4, 4), Tuning(128, block, 8, 3)]
    # Three tiles, two matrices and two sums: four warps of 64 channels would run out of registers.
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
    """The fastest option, measured when a question is asked for the first time.

    The default, without a measurement, where nothing can be measured (the interpreter, a stream that is being
    captured) and where the same bits are wanted from every process (`torch.use_deterministic_algorithms`): the chunk
    decides how sums are rounded.
    """
    if question in _known:
        return _known[question]
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return options[0]
    if torch.cuda.is_current_stream_capturing():
        return options[0]
    times = {option: _time(run, option) for option in options}
    _known[question] = min(times, key=lambda option: times[option])
    return _known[question]


def _time(run: Callable[[Tuning], Any], option: Tuning) -> float:
    """Median milliseconds, infinite where the GPU has too little shared memory."""
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
