"""A training step of Transformer-XL: ours, with and without RSA heads, against that of transformers 4.57.

    python scripts/bench_transformer_xl.py --output results

The published text8 shape (512 wide, 8 heads of 64, inner width 2048), fewer layers, segments of --length behind a
memory of as many. Each arm runs in a process of its own, the reference in its own environment (see
transformer_xl_reference.py), and they take turns: one step each, round by round. A step is forward, backward and
AdamW. Before anything is reported, both give the same loss for the same weights. Writes bench_transformer_xl.json and
.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import machine
from transformer_xl_reference import load_reference, reference_python

REFERENCE, PLAIN, RSA = "transformers 4.57", "rsa_hf, sdpa", "rsa_hf, sdpa, 4 RSA heads"
ARMS = {REFERENCE: "reference", "rsa_hf, eager": "eager", PLAIN: "sdpa", RSA: "rsa"}
TOLERANCE = 1e-5


def configuration(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields that transformers 4.57 and we share."""
    return {
        "vocab_size": 27, "cutoffs": [], "div_val": 1, "d_model": 512, "d_embed": 512, "n_head": 8, "d_head": 64,
        "d_inner": 2048, "n_layer": arguments.layers, "mem_len": arguments.length, "clamp_len": -1,
        "same_length": False, "untie_r": False, "dropout": 0.1, "dropatt": 0.0,
    }  # fmt: skip


def build(arm: str, arguments: argparse.Namespace) -> torch.nn.Module:
    """The model of an arm, with the reference's weights."""
    if arm == "reference":
        from transformers import TransfoXLConfig

        torch.manual_seed(0)
        model = load_reference().TransfoXLLMHeadModel(TransfoXLConfig(**configuration(arguments)))
        model.save_pretrained(arguments.checkpoint, safe_serialization=False)
        return model
    from transformers import AutoModelForCausalLM

    from rsa_hf import RSAConfig, patch_model

    attention = "eager" if arm == "eager" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, attn_implementation=attention)
    if arm == "rsa":
        patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[6, 6, 12, 12], gate_init=1.0))
    return model


def work(arguments: argparse.Namespace) -> None:
    """Print the loss of fresh weights, then, for each line on standard input, the seconds of one step."""
    torch.set_num_threads(arguments.threads)
    model = build(arguments.worker, arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4)
    generator = torch.Generator().manual_seed(0)

    def segment() -> torch.Tensor:
        return torch.randint(27, (arguments.batch, arguments.length), generator=generator)

    with torch.no_grad():
        tokens = segment()
        out = model.eval()(tokens, labels=tokens)
    print(float(out.loss), flush=True)
    model.train()
    mems = out.mems
    for _ in sys.stdin:
        tokens = segment()
        start = time.perf_counter()
        out = model(tokens, mems=mems, labels=tokens)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mems = out.mems
        print(time.perf_counter() - start, flush=True)


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Times of all arms, in milliseconds, one a round."""
    here = {"PYTHONPATH": os.pathsep.join(sys.path), **os.environ}
    there = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    workers, losses = {}, {}
    for name, arm in ARMS.items():
        python, environment = (reference_python(), there) if arm == "reference" else (sys.executable, here)
        options = [
            f"--{key}={getattr(arguments, key)}" for key in ("layers", "length", "batch", "threads", "checkpoint")
        ]
        workers[name] = subprocess.Popen(
            [str(python), str(Path(__file__).resolve()), *options, f"--worker={arm}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if arm == "reference" else None,
            text=True,
            env=environment,
        )
        losses[name] = ask(workers[name])
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for counted in range(-1, arguments.rounds):
        for name, worker in workers.items():
            seconds = ask(worker, "step\n")
            if counted >= 0:
                times[name].append(1000 * seconds)
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    for name in ARMS:
        # Open gates are another model; the rest is the same one.
        if name != RSA and abs(losses[name] - losses[REFERENCE]) > TOLERANCE * abs(losses[REFERENCE]):
            raise RuntimeError(f"{name} has the loss {losses[name]}, {REFERENCE} has {losses[REFERENCE]}.")
    return times


def ask(worker: subprocess.Popen[str], line: str = "") -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(line)
    worker.stdin.flush()
    return float(worker.stdout.readline())


def report(times: dict[str, list[float]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians and quartiles of each arm, and medians of the ratios of neighbours in a round."""

    def quartiles(values: list[float]) -> dict[str, float]:
        low, median, high = statistics.quantiles(values, n=4)
        return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}

    pairs = [(PLAIN, REFERENCE), ("rsa_hf, eager", REFERENCE), (RSA, REFERENCE), (RSA, PLAIN)]
    ratios = {
        f"{arm} / {rival}": quartiles([x / y for x, y in zip(times[arm], times[rival], strict=True)])
        for arm, rival in pairs
    }
    command = f"python scripts/bench_transformer_xl.py --layers {arguments.layers} --length {arguments.length}"
    return {
        "command": f"{command} --batch {arguments.batch} --rounds {arguments.rounds} --threads {arguments.threads}",
        "machine": {**machine(torch.device("cpu")), "threads": arguments.threads},
        "milliseconds": {name: quartiles(values) for name, values in times.items()},
        "ratios": ratios,
    }


def table(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        "# A training step of Transformer-XL",
        "",
        f"`{found['command']}`",
        "",
        *(f"* {key}: {value}" for key, value in found["machine"].items()),
        "",
        "| | milliseconds a step | quartiles |",
        "|---|---|---|",
        *(f"| {k} | {v['median']:.0f} | {v['low']:.0f}–{v['high']:.0f} |" for k, v in found["milliseconds"].items()),
        "",
        "Ratios within a round, where the arms take turns:",
        "",
        "| | median | quartiles |",
        "|---|---|---|",
        *(f"| {k} | {v['median']:.3f} | {v['low']:.3f}–{v['high']:.3f} |" for k, v in found["ratios"].items()),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="folder for the report")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=512, help="of a segment, and of the memory")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.checkpoint = folder
        times = measure(arguments)
    found = report(times, arguments)
    print(table(found))
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "bench_transformer_xl.json").write_text(json.dumps(found, indent=2) + "\n")
        (arguments.output / "bench_transformer_xl.md").write_text(table(found))


if __name__ == "__main__":
    main()
