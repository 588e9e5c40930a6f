"""MiniLM with and without RSA heads on Devign: the same 2,000 training functions, several seeds.

Both are trained with the settings of configs/defect_minilm_devign.yaml; the weights with the best MCC on the
validation functions are tested. The quick size trains on 64 functions and tests on as many.
"""

from __future__ import annotations

import copy
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DataCollatorWithPadding

from experiments.corpora import encode, read_devign
from experiments.pages import command, write_page
from experiments.pretrained import load_pretrained
from experiments.pretrained_tasks import predict_logits
from experiments.runner.experiment import Size
from experiments.runner.fit import adamw_with_linear_decay, batch_loss, default_device, fit
from experiments.runner.processes import machine, versions
from experiments.runner.summary import Row, interval
from rsa_hf import RSAConfig, patch_model
from rsa_hf.tasks.defect_scores import compute_metrics

ARMS = ("plain", "with RSA")
PLAN = RSAConfig(num_cyclical_pairs=3, gate_init=-3.0)
LENGTH, EPOCHS, BATCH, LEARNING_RATE = 128, 2, 32, 1e-4
FUNCTIONS: dict[Size, int] = {"toy": 64, "quick": 64, "full": 2000}


def run(arm: str, seed: int, size: Size) -> dict[str, Any]:
    """The metrics on the test functions of one fine-tuned model."""
    torch.manual_seed(seed)
    model, tokenizer = load_pretrained("minilm", layers=6)
    if arm == "with RSA":
        patch_model(model, PLAN)
    model.to(default_device())  # type: ignore[arg-type]
    examples, most = read_devign(FUNCTIONS[size]), None if size == "full" else FUNCTIONS[size]
    rows = {
        split: encode(some if split == "train" else some[:most], tokenizer, LENGTH) for split, some in examples.items()
    }
    collate = DataCollatorWithPadding(tokenizer)

    def score(split: str) -> dict[str, float]:
        asked = [*rows[split]]
        return compute_metrics(predict_logits(model, asked, collate), [row["labels"] for row in asked])

    per_epoch = math.ceil(len(rows["train"]) / BATCH)
    optimizer, schedule = adamw_with_linear_decay(model, LEARNING_RATE, EPOCHS * per_epoch)
    best, weights = -math.inf, model.state_dict()

    def evaluate(step: int, _: Tensor) -> None:
        nonlocal best, weights
        if step % per_epoch == 0 and (mcc := score("validation")["mcc"]) > best:
            best, weights = mcc, copy.deepcopy(model.state_dict())

    loss = batch_loss(model, rows["train"], BATCH, seed, collate)
    fit(loss, optimizer, EPOCHS * per_epoch, model=model, schedule=schedule, after_step=evaluate)
    model.load_state_dict(weights)
    return {"arm": arm, "seed": seed, "test": {**score("test"), "num_examples": len(rows["test"])}}


def page(runs: list[dict[str, Any]], size: Size) -> str:
    """The results as Markdown."""
    made_by, test = command("devign", size, len(runs) // len(ARMS)), runs[0]["test"]
    text = (
        f"# Devign: MiniLM with and without RSA heads\n\nMade by `{made_by}`.\n\n"
        f"{FUNCTIONS[size]:,} training functions of Devign (CodeXGLUE split; the same for all runs), inputs of "
        f"{LENGTH} tokens, {EPOCHS} epochs, tested on {test['num_examples']:,} functions; the majority class has "
        f"{test['majority_accuracy']:.2%}. Brackets have 95 % intervals over the seeds (Student's t).\n\n"
        "| model | test accuracy | F1 | MCC | seeds, accuracy each |\n|---|---|---|---|---|\n"
    )
    accuracy = {arm: [r["test"]["accuracy"] for r in runs if r["arm"] == arm] for arm in ARMS}
    for arm in ARMS:
        f1, mcc = (statistics.mean(r["test"][key] for r in runs if r["arm"] == arm) for key in ("f1", "mcc"))
        each = ", ".join(f"{value:.2%}" for value in accuracy[arm])
        text += f"| {arm} | {percent(accuracy[arm])} | {f1:.4f} | {mcc:.4f} | {each} |\n"
    differences = [rsa - plain for plain, rsa in zip(*accuracy.values(), strict=True)]
    return f"{text}\nDifference in accuracy, RSA minus plain, seed by seed: {percent(differences)}.\n"


def write(folder: Path, size: Size, seeds: int | None) -> None:
    """Measure both models; three seeds by default."""
    runs = [run(arm, seed, size) for seed in tqdm(range(seeds or 3)) for arm in ARMS]
    record = {"command": command("devign", size, seeds or 3), **versions(), "machine": machine(), "runs": runs}
    write_page(folder, "devign_minilm", size, record, page(runs, size))


def percent(values: list[float]) -> str:
    """Mean and 95 % interval, in per cent."""
    return Row({}, "accuracy", *interval(values), len(values)).text(".2%")
