"""Which heads, gates and rates should a model that is trained from scratch start with?

    RSA_HF_DATA=... python scripts/measure_start.py --output results

A byte-level Llama (4 layers, 128 wide, 8 heads) on enwik8, the same text, seeds and training for every start. Each is
`RSAConfig.from_scratch(8)` but for what its name says.

Writes results/start.json and .md: bits per byte on held-out text on the way. It goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from experiments.byte_models import SHAPES, build, read_corpus, train_on_bytes
from rsa_hf import RSAConfig, patch_model

SHAPE, LEARNING_RATE, EVALUATIONS = SHAPES["1M"], 1e-3, 4
BASE = RSAConfig.from_scratch(SHAPE.heads)
STARTS = {
    "no RSA heads": None,
    "RSAConfig.from_scratch(8)": BASE,
    "θ = π/4 for all, ν over 1 … 2 (published)": replace(BASE, theta_init=math.pi / 4, nu_init=(1.0, 2.0)),
    "θ = π/4 for all": replace(BASE, theta_init=math.pi / 4),
    "ν over 1 … 2": replace(BASE, nu_init=(1.0, 2.0)),
    "ν = −1": replace(BASE, nu_init=-1.0),
    "gates from one half": replace(BASE, gate_init=0.0),
    "θ over 0 … π/2": replace(BASE, theta_init=(0.0, math.pi / 2)),
    "two pairs, four plain heads": replace(BASE, num_cyclical_pairs=2),
}


def run(plan: RSAConfig | None, seed: int, steps: int) -> list[float]:
    text = read_corpus("enwik8", 1_000_000, 50_000, SHAPE.block)
    torch.manual_seed(seed)
    model = build("llama", SHAPE)
    if plan is not None:
        patch_model(model, plan)
    curve = train_on_bytes(
        model, text, SHAPE, learning_rate=LEARNING_RATE, steps=steps, evaluations=EVALUATIONS, seed=seed
    )
    return curve.bits_per_byte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    record = {"steps": arguments.steps, "bits_per_byte": {name: [] for name in STARTS}}
    path = arguments.output / "start.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["steps"] != record["steps"] or before["bits_per_byte"].keys() != record["bits_per_byte"].keys():
            parser.error(f"{path} is of {before['steps']} steps or of other starts; move it away first.")
        record = before
    runs = record["bits_per_byte"]
    todo = [(name, seed) for seed in range(arguments.seeds) for name in STARTS]
    for name, seed in tqdm(todo):
        if len(runs[name]) == seed:
            runs[name].append(run(STARTS[name], seed, arguments.steps))
            write(arguments.output, record)
    print((arguments.output / "start.md").read_text(encoding="utf-8"))


def write(output: Path, record: dict) -> None:
    output.mkdir(parents=True, exist_ok=True)
    record["torch"] = torch.__version__
    (output / "start.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    steps, runs = record["steps"], record["bits_per_byte"]
    seeds = max(map(len, runs.values()))
    marks = [round(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)]
    lines = [
        "# Where should RSA heads start in a model that is trained from scratch?",
        "",
        f"Made by `python scripts/measure_start.py --steps {steps} --seeds {seeds}`: a byte-level Llama (4 layers, "
        f"128 wide, 8 heads) on enwik8, {SHAPE.batch} × {SHAPE.block} bytes a step, AdamW {LEARNING_RATE}. Bits per "
        "byte on held-out text after so many steps, means over the seeds, and each seed's at the end. From the second "
        "row on every row differs from `RSAConfig.from_scratch(8)` in what it says alone.",
        "",
        f"| start | {' | '.join(map(str, marks))} | each seed |",
        "|---|" + "---|" * (len(marks) + 1),
    ]
    for name, curves in runs.items():
        if not curves:
            continue
        means = " | ".join(f"{statistics.mean(scores):.3f}" for scores in zip(*curves, strict=True))
        lines.append(f"| {name} | {means} | {', '.join(f'{curve[-1]:.3f}' for curve in curves)} |")
    (output / "start.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
