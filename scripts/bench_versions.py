"""Speed of this version over another one, in one run: training steps, decoding and P V alone.

    git worktree add ../rsa_hf-0.1 3001ae8
    python scripts/bench_versions.py --against ../rsa_hf-0.1 --output results

A process for each version measures one repetition at a time, in turn, so that a busy machine slows both alike. Writes
bench_versions.json and bench_versions.md: the median of the ratios of neighbouring repetitions, and their quartiles,
by the clock and by the processor's time, which does not count what other programs take from the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import machine

ROOT = Path(__file__).resolve().parents[1]
REPETITIONS = 40


def product(length: int) -> Callable[[], object]:
    from rsa_hf import rem_product

    kinds = ["regular"] * 4 + ["cos"] * 4 + ["sin"] * 4
    value = torch.randn(2, 12, length, 64, requires_grad=True)
    decay, theta = torch.linspace(0.3, 0.95, 12).requires_grad_(), torch.linspace(0, 1.5, 12).requires_grad_()
    grad = torch.randn(2, 12, length, 64)
    return lambda: rem_product(value, kinds, decay, theta).backward(grad)


def step(name: str, length: int, batch: int) -> Callable[[], object]:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    from rsa_hf import RSAConfig, patch_model

    if name == "gpt2":
        model, heads = GPT2LMHeadModel(GPT2Config()), 12
    else:
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        model, heads = BertForMaskedLM(BertConfig(**sizes)), 12
    patch_model(model, RSAConfig.from_scratch(heads)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(5, 1000, (batch, length))

    def run() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return run


def decoding(context: int, padding: int) -> Callable[[], object]:
    from transformers import GPT2Config, GPT2LMHeadModel

    from rsa_hf import RSAConfig, patch_model

    model = patch_model(GPT2LMHeadModel(GPT2Config()), RSAConfig.from_scratch(12)).eval()
    tokens = torch.randint(5, 1000, (2, context))
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0

    def run() -> None:
        with torch.no_grad():
            cache = state["cache"]
            row = torch.ones(2, 1, dtype=torch.long)
            state["mask"] = torch.cat([state["mask"], row], 1)
            state["cache"] = model(input_ids=row, attention_mask=state["mask"], past_key_values=cache).past_key_values

    with torch.no_grad():
        cache = model(input_ids=tokens, attention_mask=mask, use_cache=True).past_key_values
    state = {"cache": cache, "mask": mask}
    return run


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "P V and its gradients, T = 128": lambda: product(128),
    "P V and its gradients, T = 1,024": lambda: product(1024),
    "training step, BERT 6 × 384, T = 128, B = 16": lambda: step("bert", 128, 16),
    "training step, GPT-2 small, T = 128, B = 4": lambda: step("gpt2", 128, 4),
    "training step, GPT-2 small, T = 512, B = 1": lambda: step("gpt2", 512, 1),
    "a decoded token, GPT-2 small, context 500": lambda: decoding(500, 0),
    "a decoded token, the same, left-padded": lambda: decoding(500, 20),
}


def work() -> None:
    """Measure one repetition of the named case for each line on stdin."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    held: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in held:
            held.clear()
            held[name] = CASES[name]()
        began, cpu_began = time.perf_counter(), time.process_time()
        held[name]()
        print(time.perf_counter() - began, time.process_time() - cpu_began, flush=True)


def worker(checkout: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.setdefault("OMP_NUM_THREADS", "2")
    environment["OMP_WAIT_POLICY"] = "passive"  # a thread that waits takes no processor time
    command = [sys.executable, str(Path(__file__).resolve()), "--work"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], name: str) -> tuple[float, float]:
    """Seconds of one repetition, on the clock and of the processor."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(name + "\n")
    process.stdin.flush()
    seconds, cpu_seconds = map(float, process.stdout.readline().split())
    return seconds, cpu_seconds


def measure(new: subprocess.Popen[str], old: subprocess.Popen[str], name: str) -> dict[str, float]:
    for _ in range(3):
        ask(old, name), ask(new, name)
    pairs = []
    for i in range(REPETITIONS):
        first, second = (old, new) if i % 2 else (new, old)
        a, b = ask(first, name), ask(second, name)
        pairs.append((b, a) if i % 2 else (a, b))
    row = {}
    for i, prefix in enumerate(("", "cpu_")):
        low, middle, high = statistics.quantiles([mine[i] / theirs[i] for mine, theirs in pairs], n=4)
        row |= {f"{prefix}ratio": middle, f"{prefix}low": low, f"{prefix}high": high}
        for version, times in zip(("new", "old"), zip(*pairs, strict=True), strict=True):
            row[f"{prefix}{version}"] = statistics.median(each[i] for each in times)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of the other version")
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    if arguments.against is None:
        parser.error("--against CHECKOUT is needed")
    against, processor = arguments.against.resolve(), machine(torch.device("cpu"))["processor"]
    new, old = worker(ROOT), worker(against)
    rows = {}
    for name in CASES:
        rows[name] = measure(new, old, name)
        print(f"{name}: {rows[name]['ratio']:.3f}, processor {rows[name]['cpu_ratio']:.3f}", flush=True)
    for process in (new, old):
        process.kill()
    (arguments.output / "bench_versions.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    lines = [
        f"# Speed of this version over {against.name}",
        "",
        f"Written by scripts/bench_versions.py on {processor}, two threads. The versions run in turn; the "
        f"median of {REPETITIONS} ratios of neighbouring repetitions, and their quartiles. RSA on all heads.",
        "",
        "| | clock: new / old | quartiles | processor: new / old | quartiles | new, ms | old, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [name]
        for prefix in ("", "cpu_"):
            cells += [f"{row[f'{prefix}ratio']:.3f}", f"{row[f'{prefix}low']:.3f} … {row[f'{prefix}high']:.3f}"]
        cells += [f"{1000 * row[version]:.1f}" for version in ("new", "old")]
        lines.append(f"| {' | '.join(cells)} |")
    (arguments.output / "bench_versions.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
