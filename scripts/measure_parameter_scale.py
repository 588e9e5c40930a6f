"""Which way of letting gates and rates learn faster is the better default?

    python scripts/measure_parameter_scale.py --output results

A byte-level Llama from scratch on Python source, the same text, seeds and clipping for every arm:

* `plain`: no RSA heads.
* `weights' pace`: RSA parameters stored as they are, at the weights' learning rate.
* `own group`: stored as they are, in a parameter group of 20 times the learning rate, without decay.
* `stored scaled`: stored as value / 20, one learning rate for all, as any Trainer would do it (the default).

Writes results/parameter_scale.json and .md: bits per byte on held-out text, and where the gates went.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import get_scheduler

from experiments.byte_models import SHAPES, build
from rsa_hf import RSAConfig, param_groups, patch_model, rsa_report
from rsa_hf.tasks.language_modeling import evaluate_language_model, prepare_language_modeling
from rsa_hf.tasks.text_data import LanguageModelingDataConfig

ARMS = ("plain", "weights' pace", "own group", "stored scaled")
SCALE = 20.0
LEARNING_RATE = 1e-3
SHAPE = SHAPES["1M"]


def run(arm: str, seed: int, steps: int, text) -> dict:
    torch.manual_seed(seed)
    model = build("llama", SHAPE)
    if arm != "plain":
        patch_model(model, RSAConfig(gate_init=0.0, parameter_scale=SCALE if arm == "stored scaled" else 1.0))
    if arm == "own group":
        groups = param_groups(model, LEARNING_RATE, weight_decay=0.01, rsa_learning_rate=SCALE * LEARNING_RATE)
        optimizer = torch.optim.AdamW(groups)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(seed))
    model.train()
    for step in tqdm(range(steps), desc=f"{arm}, seed {seed}", mininterval=10):
        rows = [
            text.train[int(i)] for i in order[torch.arange(step * SHAPE.batch, (step + 1) * SHAPE.batch) % len(order)]
        ]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    score = evaluate_language_model(model, text.validation, 32)
    gates = [layer.heads[0].gate for layer in rsa_report(model).layers]
    return {"arm": arm, "seed": seed, "bits_per_byte": score["bits_per_byte"], "gates": gates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    data = LanguageModelingDataConfig(block_size=SHAPE.block, max_train_bytes=2_000_000, max_eval_bytes=100_000)
    text = prepare_language_modeling(data, None)
    runs: list[dict] = []
    for seed in range(arguments.seeds):
        runs += [run(arm, seed, arguments.steps, text) for arm in ARMS]
        write(arguments.output, runs, arguments.steps)


def write(output: Path, runs: list[dict], steps: int) -> None:
    seeds = len(runs) // len(ARMS)
    command = f"python scripts/measure_parameter_scale.py --steps {steps} --seeds {seeds}"
    output.mkdir(parents=True, exist_ok=True)
    record = {"command": command, "torch": torch.__version__, "runs": runs}
    (output / "parameter_scale.json").write_text(json.dumps(record, indent=2) + "\n")
    lines = [
        "# How fast should gates and rates learn?",
        "",
        f"Made by `{command}`: a byte-level Llama (4 layers, 128 wide) on Python source, {steps} steps of "
        f"{SHAPE.batch} × {SHAPE.block} bytes, AdamW {LEARNING_RATE}, gradients clipped at norm 1.",
        "",
        "| arm | bits per byte, mean | per seed | gates after training (first seed) |",
        "|---|---|---|---|",
    ]
    for arm in ARMS:
        mine = [r for r in runs if r["arm"] == arm]
        scores = [r["bits_per_byte"] for r in mine]
        gates = " / ".join(f"{gate:.2f}" for gate in mine[0]["gates"]) or "none"
        each = ", ".join(f"{score:.3f}" for score in scores)
        lines.append(f"| {arm} | {statistics.mean(scores):.3f} | {each} | {gates} |")
    (output / "parameter_scale.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
