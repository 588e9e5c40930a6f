"""Which way of letting gates and rates learn faster is the better default?

A byte-level Llama from scratch on Python source, the same text, seeds and clipping for every arm:

* `plain`: no RSA heads.
* `weights' pace`: RSA parameters stored as they are, at the weights' learning rate.
* `own group`: stored as they are, in a parameter group of 20 times the learning rate, without decay.
* `stored scaled`: stored as value / 20, one learning rate for all, as any Trainer would do it (the default).
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import get_scheduler

from experiments.byte_models import SHAPES, bits_per_byte, build
from experiments.corpora import read_corpus, training_blocks
from experiments.pages import command, write_page
from experiments.runner.experiment import Size
from experiments.runner.fit import batch_loss, fit
from rsa_hf import RSAConfig, param_groups, patch_model, rsa_report

ARMS = ("plain", "weights' pace", "own group", "stored scaled")
SCALE, LEARNING_RATE, SHAPE = 20.0, 1e-3, SHAPES["1M"]
STEPS: dict[Size, int] = {"toy": 2, "quick": 30, "full": 120}


def run(arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Bits per byte on held-out text, and where the gates went."""
    text = read_corpus("python", 2_000_000, 100_000, SHAPE.block)
    torch.manual_seed(seed)
    model = build("llama", SHAPE)
    if arm != "plain":
        patch_model(model, RSAConfig(gate_init=0.0, parameter_scale=SCALE if arm == "stored scaled" else 1.0))
    groups: Any = model.parameters()
    if arm == "own group":
        groups = param_groups(model, LEARNING_RATE, weight_decay=0.01, rsa_learning_rate=SCALE * LEARNING_RATE)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    fit(batch_loss(model, training_blocks(text), SHAPE.batch, seed), optimizer, steps, model=model, schedule=schedule)
    gates = [layer.heads[0].gate for layer in rsa_report(model).layers]
    return {"arm": arm, "seed": seed, "bits_per_byte": bits_per_byte(model, text.validation), "gates": gates}


def write(folder: Path, size: Size, seeds: int | None) -> None:
    """Measure all arms; two seeds by default."""
    steps, seeds = STEPS[size], seeds or 2
    runs = [run(arm, seed, steps) for seed in tqdm(range(seeds)) for arm in ARMS]
    made_by = command("parameter-scale", size, seeds)
    lines = [
        "# How fast should gates and rates learn?\n",
        f"Made by `{made_by}`: a byte-level Llama (4 layers, 128 wide) on Python source, {steps} steps of "
        f"{SHAPE.batch} × {SHAPE.block} bytes, AdamW {LEARNING_RATE}, gradients clipped at norm 1.\n",
        "| arm | bits per byte, mean | per seed | gates after training (first seed) |",
        "|---|---|---|---|",
    ]
    for arm in ARMS:
        mine = [each for each in runs if each["arm"] == arm]
        scores = [each["bits_per_byte"] for each in mine]
        gates = " / ".join(f"{gate:.2f}" for gate in mine[0]["gates"]) or "none"
        each_seed = ", ".join(f"{score:.3f}" for score in scores)
        lines.append(f"| {arm} | {statistics.mean(scores):.3f} | {each_seed} | {gates} |")
    record = {"command": made_by, "torch": torch.__version__, "runs": runs}
    write_page(folder, "parameter_scale", size, record, "\n".join(lines) + "\n")
