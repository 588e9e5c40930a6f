"""The whole workflow once, on this machine, in a few minutes: `make demo`.

1. Patch a real pretrained encoder (MiniLM, from the Python package index) and fine-tune it on defect detection; do the
   same without RSA heads, with the same data, steps, seed and learning rate.
2. Save, reload in a new process, and check that every output is the same to the last bit.
3. Show the learned decay curves and gates; the model card has them too.
4. Train a byte-level language model from scratch, patched and plain, and draw both curves.

Every training run is the command that a user would type; the demo prints it.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rsa_hf
from rsa_hf.cli.common import exit_on_error
from rsa_hf.plots import plot_training_curves
from rsa_hf.utils.text import format_table

CONFIGS = Path(__file__).parents[1] / "configs"
ARMS = {"with RSA": [], "plain": ["--rsa", "none"]}

CHECK = """
import sys, torch, rsa_hf
from transformers import AutoModelForSequenceClassification
folder, saved = sys.argv[1:]
batch, expected = torch.load(saved)
model = AutoModelForSequenceClassification.from_pretrained(folder)
with torch.no_grad():
    found = model(**batch).logits
assert rsa_hf.is_patched(model) and torch.equal(found, expected), (found - expected).abs().max()
"""


def run(task: str, config: str, output: Path, *settings: str) -> dict:
    """Train with the command line, which is printed; return the results."""
    words = ["train", task, os.path.relpath(CONFIGS / config), "--output_dir", str(output), *settings]
    print(f"\n$ rsa-hf {shlex.join(words)}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-c", "from rsa_hf.cli import main; main()", *words, "--overwrite_output_dir"]
    subprocess.run(command, check=True)
    return {**json.loads((output / "all_results.json").read_text()), "seconds": time.monotonic() - started}


def defect_detection(output: Path, steps: int) -> Path:
    settings = ["--max_steps", str(steps)]
    results = {
        arm: run("defect", "defect_demo.yaml", output / folder, *settings, *more)
        for (arm, more), folder in zip(ARMS.items(), ("patched", "plain"), strict=True)
    }
    plain = results["plain"]
    majority = f"{plain['test_majority_accuracy']:.2%}"
    rows = [["model", "test accuracy", "F1", "MCC", "functions", "seconds"]]
    rows.append(["majority class", majority, "", "", f"{plain['test_num_examples']}", ""])
    for arm, result in results.items():
        scores = [f"{result['test_accuracy']:.2%}", f"{result['test_f1']:.4f}", f"{result['test_mcc']:.4f}"]
        rows.append([arm, *scores, f"{result['test_num_examples']}", f"{result['seconds']:.0f}"])
    print("\nDefect detection, the same data, steps and seed:\n\n" + format_table(rows))
    folder = output / "patched"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    print(f"\nGates and rates of the patched model (also: rsa-hf inspect {folder}):\n\n{rsa_hf.rsa_report(model)}")
    return folder


def check_reload(folder: Path, output: Path) -> None:
    """Compare the outputs of the saved model in a new process with those in this one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    texts = [
        "def f(x):\n    return x + 1",
        "def g(items, i):\n    if not items:\n        return None\n    return items[i - 1]",
    ]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    with torch.no_grad():
        torch.save((batch, model(**batch).logits), output / "logits.pt")
    subprocess.run([sys.executable, "-c", CHECK, str(folder), str(output / "logits.pt")], check=True)
    print(f"\nReloaded {folder} in a new process: every output is the same, bit for bit.")


def language_model(output: Path, steps: int) -> None:
    curves = {}
    every = str(max(1, steps // 6))
    settings = ["--max_steps", str(steps), "--eval_steps", every, "--save_steps", every, "--max_eval_bytes", "30000"]
    for (arm, more), folder in zip(ARMS.items(), ("lm_patched", "lm_plain"), strict=True):
        run("lm", "lm_bytes_embedded.yaml", output / folder, *settings, *more)
        history = json.loads((output / folder / "trainer_state.json").read_text())["log_history"]
        curves[arm] = [(r["step"], r["eval_bits_per_byte"]) for r in history if "eval_bits_per_byte" in r]
    plot_training_curves(
        curves,
        output / "lm_curves.png",
        xlabel="steps of 16 × 256 bytes",
        ylabel="bits per byte on held-out text",
        title="A byte-level language model from scratch",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--defect-steps", type=int, default=120)
    parser.add_argument("--lm-steps", type=int, default=80)
    arguments = parser.parse_args()
    started = time.monotonic()
    arguments.output.mkdir(parents=True, exist_ok=True)
    folder = defect_detection(arguments.output, arguments.defect_steps)
    check_reload(folder, arguments.output)
    language_model(arguments.output, arguments.lm_steps)
    print(
        f"\nDone in {(time.monotonic() - started) / 60:.1f} minutes. Look at:\n"
        f"  {folder / 'rsa.png'}: the learned decay curves and gates\n"
        f"  {folder / 'README.md'}: the model card\n"
        f"  {arguments.output / 'lm_curves.png'}: the language model, patched and plain"
    )


if __name__ == "__main__":
    with exit_on_error():
        main()
