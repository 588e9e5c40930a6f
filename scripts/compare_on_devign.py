"""Patched against unpatched MiniLM on Devign: the same training functions, several seeds, one table.

    python scripts/compare_on_devign.py --data FOLDER --output results

FOLDER holds train.jsonl.xz, valid.jsonl.xz and test.jsonl.xz of the CodeXGLUE split. Each run is one call of
scripts/train_defect_detection.py with configs/defect_minilm_devign.yaml, and the settings that follow this script's.
A run that is finished is not repeated, one that was stopped goes on where it was, one of other settings is refused.
Writes devign_minilm.json and .md into the output folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from experiments.runner import summary
from rsa_hf.cli.common import exit_on_error
from rsa_hf.tasks.defect_data import DefectDataConfig
from rsa_hf.training.arguments import read_run_config
from rsa_hf.utils.text import finite_or_null

SCRIPTS = Path(__file__).parent
CONFIG = SCRIPTS.parent / "configs" / "defect_minilm_devign.yaml"
ARMS = {"plain": ["--rsa", "null"], "with RSA": []}


def run(arm: str, seed: int, data: Path, work: Path, more: list[str]) -> dict:
    output = work / f"{arm.replace(' ', '_')}-{seed}"
    path = output / "results.json"
    files = [f"--{split}_file={data / name}.jsonl.xz" for split, name in FILES.items()]
    settings = [str(CONFIG), *files, *ARMS[arm], *more, "--training.seed", str(seed), "--output_dir", str(output)]
    if not path.exists():
        command = [sys.executable, str(SCRIPTS / "train_defect_detection.py"), *settings]
        subprocess.run(command, check=True, env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"})
    results = json.loads(path.read_text())
    asked = json.loads(json.dumps(finite_or_null(read_run_config(settings, DefectDataConfig).to_dict())))
    if results["config"] != asked:
        raise ValueError(f"{path} is of a run with other settings; move it away, or name another folder as --work.")
    return {"arm": arm, "seed": seed, **results}


FILES = {"train": "train", "validation": "valid", "test": "test"}


def interval(values: list[float]) -> str:
    """Mean and 95 % interval of Student's t, in per cent."""
    mean, low, _ = summary.interval(values)
    return f"{mean:.2%}" if math.isnan(low) else f"{mean:.2%} ± {mean - low:.2%}"


def table(runs: list[dict], command: str) -> str:
    config = runs[0]["config"]
    test = runs[0]["test"]
    lines = [
        "# Devign: MiniLM with and without RSA heads",
        "",
        f"Made by `{command}`.",
        "",
        f"{config['data']['max_train_examples']:,} training functions of Devign (CodeXGLUE split; the same for all "
        f"runs, chosen with seed {config['data']['seed']}), inputs of {config['data']['max_length']} tokens, "
        f"{config['training']['epochs']:g} epochs, tested on {test['num_examples']:,} functions; the majority class "
        f"has {test['majority_accuracy']:.2%}. ± is the 95 % interval of Student's t over the seeds.",
        "",
        "| model | test accuracy | F1 | MCC | seeds, accuracy each |",
        "|---|---|---|---|---|",
    ]
    for arm in ARMS:
        mine = [r for r in runs if r["arm"] == arm]
        accuracy = [r["test"]["accuracy"] for r in mine]
        f1, mcc = (statistics.mean(r["test"][key] for r in mine) for key in ("f1", "mcc"))
        each = ", ".join(f"{value:.2%}" for value in accuracy)
        lines.append(f"| {arm} | {interval(accuracy)} | {f1:.4f} | {mcc:.4f} | {each} |")
    by_arm = {arm: {r["seed"]: r["test"]["accuracy"] for r in runs if r["arm"] == arm} for arm in ARMS}
    differences = [by_arm["with RSA"][seed] - by_arm["plain"][seed] for seed in by_arm["plain"]]
    lines += ["", f"Difference in accuracy, RSA minus plain, seed by seed: {interval(differences)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--work", type=Path, default=Path("outputs/devign"), help="where the runs go")
    parser.add_argument("--seeds", type=int, default=3)
    arguments, more = parser.parse_known_args()
    runs = [run(arm, seed, arguments.data, arguments.work, more) for seed in range(arguments.seeds) for arm in ARMS]
    command = " ".join(["python scripts/compare_on_devign.py --data FOLDER --seeds", str(arguments.seeds), *more])
    arguments.output.mkdir(parents=True, exist_ok=True)
    machine = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
    record = {"command": command, **machine, "runs": runs}
    (arguments.output / "devign_minilm.json").write_text(json.dumps(record, indent=1) + "\n")
    text = table(runs, command)
    (arguments.output / "devign_minilm.md").write_text(text)
    print(text)


if __name__ == "__main__":
    with exit_on_error(ValueError, OSError):
        main()
