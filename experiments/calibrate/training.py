"""What a variant of a pretrained model scores, after nothing, a few numbers, everything or LoRA was trained."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import rsa_hf.peft
from experiments.calibrate.variants import LORA, PLAIN, make_variant
from experiments.pretrained import load_pretrained
from experiments.pretrained_tasks import Task, defect_task, text_task
from experiments.runner.files import cached
from experiments.runner.fit import adamw_linear_decay, batch_loss, default_device, fit
from experiments.runner.summary import Settings, Values
from rsa_hf import RSAConfig, RSAHeads
from rsa_hf.calibration import run_calibration

# What is trained.
NOTHING, NUMBERS, EVERYTHING, LORA_TRAINED = "nothing", "a few numbers", "everything", "lora"
DEVIGN = "devign"
SCHEDULE = "warmup_stable_decay"  # of the byte-level models
LORA_RANK = 8
LORA_PARAMETER_SCALE = 5  # LoRA has its best rate at a few times that of all weights; gates would move too fast


def measure(settings: Settings) -> Values:
    """Train one variant and score it. With a seed all variants see the same data in the same order."""
    seed, trained, arm = settings["seed"], settings["trained"], settings["arm"]
    with torch.random.fork_rng():
        model, make_task, found = find_calibration(settings)
        weights = [float(int(found["weights"], 16))]
        task, plan = make_task(seed), RSAConfig.from_dict(found["config"])
        torch.manual_seed(seed)
        if trained == LORA_TRAINED:
            variant = _with_lora(arm, model, plan)
        else:
            variant = make_variant(arm, model, plan)
            if trained != EVERYTHING:
                _freeze_weights(variant, arm, trained)
        variant = variant.to(default_device())
        numbers = sum(p.numel() for p in variant.parameters() if p.requires_grad)
        if numbers:
            _train(variant, task, settings)
        values: Values = {"score": task.score(variant, "test"), "numbers": float(numbers), "weights": weights}
        if trained != NOTHING:
            values["validation"] = task.score(variant, "validation")
    return values | {
        "chosen heads": float(len(plan.heads or ())),
        "checked gain": found["gain"],
        "checked gain without recurrence": found["gain_without_recurrence"],
    }


def find_calibration(settings: Settings) -> tuple[PreTrainedModel, Callable[[int], Task], Mapping[str, Any]]:
    """A pretrained model; its task, by the seed that chooses the portion to train on; what `run_calibration` finds.

    That is computed once, on rows of the task; `weights` is a digest of the model's weights.
    """
    torch.manual_seed(settings["seed"])  # of a classifier's new head
    model, tokenizer = load_pretrained(settings["model"], settings["layers"], settings["pretraining_steps"], SCHEDULE)
    data = {name: settings[name] for name in ("share", "most", "scored", "length")}

    def make_task(seed: int) -> Task:
        if settings["task"] == DEVIGN:
            return defect_task(tokenizer, **data, seed=seed)
        return text_task(settings["task"], tokenizer, **data, seed=seed, test_seed=settings["seed"])

    def calibrate(path: Path) -> None:
        found = _calibrate(model, make_task(settings["seed"]), settings)
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")

    names = ("model", "task", "share", "length", "rows", "seed", "layers", "pretraining_steps", "most")
    weights = _digest(model)
    depends_on = {name: settings[name] for name in names} | {"weights": weights}
    path = cached(f"calibration-{settings['model']}", depends_on, ".json", calibrate)
    return model, make_task, json.loads(path.read_text(encoding="utf-8")) | {"weights": weights}


def _digest(model: nn.Module) -> str:
    """48 bits that tell a model's weights from others: pretrained again by other code, they differ by rounding."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def _calibrate(model: PreTrainedModel, task: Task, settings: Settings) -> dict[str, Any]:
    """What `run_calibration` finds on random rows of a task."""
    chosen = torch.randperm(len(task.rows), generator=torch.Generator().manual_seed(settings["seed"]))
    rows = [task.rows[i] for i in chosen[: settings["rows"]].tolist()]
    batches = [{**task.collate(rows[i : i + 4])} for i in range(0, len(rows), 4)]
    model.to(default_device())  # type: ignore[arg-type]
    limits = {"max_rows": settings["rows"], "seed": settings["seed"]}
    found = run_calibration(model, batches, **limits, progress=False).to_dict()
    return {name: found[name] for name in ("config", "gain", "gain_error", "gain_without_recurrence")}


def _with_lora(variant: str, model: PreTrainedModel, plan: RSAConfig) -> Any:
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK)
    if variant == PLAIN:
        return peft.get_peft_model(model, config)
    return rsa_hf.peft.get_peft_model(model, config, replace(plan, parameter_scale=LORA_PARAMETER_SCALE))


def _freeze_weights(model: nn.Module, variant: str, trained: str) -> None:
    """Leave the numbers of RSA heads, or of a PEFT adapter, to be trained; or nothing."""
    if trained == NUMBERS and variant == LORA:
        return
    numbers = {p for m in model.modules() if isinstance(m, RSAHeads) for p in m.parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(trained == NUMBERS and parameter in numbers)


def _train(model: nn.Module, task: Task, settings: Settings) -> None:
    """Train in place; models from packages in mixed precision, in bfloat16."""
    steps = settings["steps"]
    torch.manual_seed(settings["seed"])  # the same dropout for all variants
    optimizer, schedule = adamw_linear_decay(model, settings["learning_rate"], steps)
    loss_of_batch = batch_loss(model, task.rows, settings["batch"], settings["seed"], task.collate)
    precision = torch.autocast(default_device().type, torch.bfloat16, enabled=not settings["pretraining_steps"])

    def loss(step: int) -> Tensor:
        with precision:
            return loss_of_batch(step)

    def stop_if_diverged(step: int, value: Tensor) -> bool:
        return not math.isfinite(float(value))

    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=stop_if_diverged)
