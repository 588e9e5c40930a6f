"""Which heads, gates and rates should a model that is trained from scratch start with?

A byte-level Llama (4 layers, 128 wide, 8 heads) on enwik8, the same text, seeds and training for every start. Each is
`RSAConfig.from_scratch(8)` but for what its name says.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from experiments.byte_models import SHAPES, build, train_on_bytes
from experiments.corpora import read_corpus
from experiments.pages import command, write_page
from experiments.runner.experiment import Size
from rsa_hf import RSAConfig, patch_model

SHAPE, LEARNING_RATE, EVALUATIONS = SHAPES["1M"], 1e-3, 4
STEPS: dict[Size, int] = {"toy": 4, "quick": 40, "full": 160}
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
    """Bits per byte on held-out text on the way."""
    text = read_corpus("enwik8", 1_000_000, 50_000, SHAPE.block)
    torch.manual_seed(seed)
    model = build("llama", SHAPE)
    if plan is not None:
        patch_model(model, plan)
    plan_of_training = {"learning_rate": LEARNING_RATE, "steps": steps, "evaluations": EVALUATIONS}
    return train_on_bytes(model, text, SHAPE, **plan_of_training, seed=seed).bits_per_byte  # type: ignore[arg-type]


def write(folder: Path, size: Size, seeds: int | None) -> None:
    """Measure all starts; one seed by default."""
    steps, seeds = STEPS[size], seeds or 1
    runs = {name: [run(plan, seed, steps) for seed in range(seeds)] for name, plan in tqdm(STARTS.items())}
    marks = [round(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)]
    lines = [
        "# Where should RSA heads start in a model that is trained from scratch?\n",
        f"Made by `{command('start', size, seeds)}`: a byte-level Llama (4 layers, "
        f"128 wide, 8 heads) on enwik8, {steps} steps of {SHAPE.batch} × {SHAPE.block} bytes, AdamW {LEARNING_RATE}. "
        "Bits per byte on held-out text after so many steps, means over the seeds, and each seed's at the end. From "
        "the third row on every row differs from `RSAConfig.from_scratch(8)` in what it says alone.\n",
        f"| start | {' | '.join(map(str, marks))} | each seed |",
        "|---|" + "---|" * (len(marks) + 1),
    ]
    for name, curves in runs.items():
        means = " | ".join(f"{statistics.mean(scores):.3f}" for scores in zip(*curves, strict=True))
        lines.append(f"| {name} | {means} | {', '.join(f'{curve[-1]:.3f}' for curve in curves)} |")
    record = {"steps": steps, "bits_per_byte": runs, "torch": torch.__version__}
    write_page(folder, "start", size, record, "\n".join(lines) + "\n")
