"""Where the time of a training step goes that RSA heads add, by part.

    python scripts/profile_step.py --output results

The models of bench_model.py, plain and patched in turn. The parts are timed inside the patched steps, by wrapping the
functions that compute them; what a step takes longer and no part accounts for is autograd, the gradients of the
parameters of gates and rates, the optimizer's share of them, and Python in between. Beside P V stands its floor: the
bytes that it has to read and write, at the speed at which the machine copies. Writes profile_step.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_model import PLAIN, RSA, TRAINING, Training, training_step
from measuring import machine, throughput

import rsa_hf.heads
import rsa_hf.integration.attention
import rsa_hf.ops.autograd

# What the wrapped functions compute. The mixing contains the three parts after it.
MIXING, MASK, RATES = "forward, all of it", "reading the mask", "rates and gates"
FORWARD, BACKWARD = "P V and mixing", "their gradients"
PARTS: dict[str, tuple[Any, str]] = {
    MIXING: (rsa_hf.integration.attention, "mix_recurrence"),
    MASK: (rsa_hf.integration.attention, "read_attention_mask"),
    RATES: (rsa_hf.heads.RSAHeads, "_rems_and_gate"),
    FORWARD: (rsa_hf.ops.autograd, "_forward"),
    BACKWARD: (rsa_hf.ops.autograd, "_backward"),
}
# Arrays of the size of V: V, attention and output; dOut twice, V, attention, dV and dAttention.
PASSES = {FORWARD: 3, BACKWARD: 6}


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Sum up the milliseconds of each part while the context is open."""
    spent: dict[str, float] = defaultdict(float)

    def wrapped(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given, **keywords)
            finally:
                spent[part] += 1000 * (time.perf_counter() - start)

        return call

    originals = {part: getattr(owner, name) for part, (owner, name) in PARTS.items()}
    for part, (owner, name) in PARTS.items():
        setattr(owner, name, wrapped(part, originals[part]))
    try:
        yield spent
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, originals[part])


def profile(name: str, case: Training) -> dict[str, Any]:
    """Medians over rounds, in milliseconds a step: the plain step, what RSA adds to it, and its parts."""
    steps = {arm: training_step(arm, name, "cpu") for arm in (PLAIN, RSA)}
    plain: list[float] = []
    added: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for counted in range(-2, case.rounds):
        start = time.perf_counter()
        steps[PLAIN]()
        middle = time.perf_counter()
        with timed() as spent:
            steps[RSA]()
        end = time.perf_counter()
        if counted >= 0:
            plain.append(1000 * (middle - start))
            added.append(1000 * (end - middle) - plain[-1])
            for part in PARTS:
                parts[part].append(spent[part])
    return {
        "plain": statistics.median(plain),
        "added": statistics.median(added),
        "parts": {part: statistics.median(times) for part, times in parts.items()},
    }


def floors(name: str, case: Training, copy_gb_per_s: float) -> dict[str, float]:
    """Milliseconds a step that the bytes of P V and of its gradients take at the speed of a copy."""
    config = case.model().config
    channels = config.hidden_size * config.num_hidden_layers
    megabytes = case.batch * case.length * channels * 4 / 1e6
    return {part: passes * megabytes / copy_gb_per_s for part, passes in PASSES.items()}


def table(record: dict[str, Any]) -> str:
    head, speed = record["machine"], record["throughput"]
    lines = [
        "# Where the time goes that RSA heads add to a training step",
        "",
        f"Made by `python scripts/profile_step.py` on {head['processor']}, {head['threads']} threads, torch "
        f"{head['torch']}, commit {head['commit']}, which copied {speed['copy_gb_per_s']:.1f} GB/s in the same run. "
        "Milliseconds a step, medians. The rest is autograd, the gradients of gates and rates, and Python. In "
        "brackets the floor: the bytes of the part at the speed of a copy. The five parts are timed directly, also as "
        "a share of the plain step; `added` and the rest are differences of whole steps, of long ones mostly noise.",
        "",
        f"| | plain step | added | {MASK} | {RATES} | {FORWARD} | other forward | {BACKWARD} | these five, % | rest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in record["rows"].items():
        parts, floor = row["parts"], row["floors"]
        other = parts[MIXING] - parts[MASK] - parts[RATES] - parts[FORWARD]
        rest = row["added"] - parts[MIXING] - parts[BACKWARD]
        cells = [
            *(f"{number:.2f}" for number in (row["plain"], row["added"], parts[MASK], parts[RATES])),
            f"{parts[FORWARD]:.2f} [{floor[FORWARD]:.2f}]",
            f"{other:.2f}",
            f"{parts[BACKWARD]:.2f} [{floor[BACKWARD]:.2f}]",
            f"{100 * (parts[MIXING] + parts[BACKWARD]) / row['plain']:.1f}",
            f"{rest:.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results"))
    options = parser.parse_args()
    cpu = torch.device("cpu")
    speed, rows = throughput(cpu), {}
    for name, case in TRAINING.items():
        rows[name] = {**profile(name, case), "floors": floors(name, case, speed["copy_gb_per_s"])}
        print(name, rows[name], flush=True)
    record = {"machine": machine(cpu), "throughput": speed, "rows": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "profile_step.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.output / "profile_step.md").write_text(table(record))
    print(table(record))


if __name__ == "__main__":
    main()
