"""What a variant of a pretrained model scores, after nothing, a few numbers, everything or LoRA was trained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, get_scheduler

import rsa_hf.peft
from rsa_hf.calibration import run_calibration
from rsa_hf.config import RSAConfig
from rsa_hf.experiments.calibrate.variants import IA3, LORA, PLAIN, make_variant
from rsa_hf.experiments.fine_tune.training import Task, defect_task, text_task
from rsa_hf.experiments.pretrained import load_pretrained
from rsa_hf.experiments.runner.fit import batch_loss, default_device, fit
from rsa_hf.experiments.runner.kept import kept
from rsa_hf.experiments.runner.summary import Settings, Values
from rsa_hf.heads import RSAHeads
from rsa_hf.training.optimizer import param_groups

__all__ = ["DEVIGN", "EVERYTHING", "LORA_TRAINED", "NOTHING", "NUMBERS", "measure"]

# What is trained.
NOTHING, NUMBERS, EVERYTHING, LORA_TRAINED = "nothing", "a few numbers", "everything", "lora"
DEVIGN = "devign"
SCHEDULE = "warmup_stable_decay"  # of the byte-level models
LORA_RANK = 8


def measure(settings: Settings) -> Values:
    """Train one variant and score it. With a seed all variants see the same data in the same order."""
    seed, trained = settings["seed"], settings["trained"]
    with torch.random.fork_rng():
        model, tokenizer = _load(settings)
        task = _task(settings, tokenizer)
        found = _calibration(settings, model, task)
        plan = RSAConfig.from_dict(found["config"])
        torch.manual_seed(seed)
        if trained == LORA_TRAINED:
            variant = _with_lora(settings["arm"], model, plan)
        else:
            variant = make_variant(settings["arm"], model, plan, settings["length"], seed)
            if trained != EVERYTHING:
                _freeze_weights(variant, settings["arm"], trained)
        variant = variant.to(default_device())
        numbers = sum(p.numel() for p in variant.parameters() if p.requires_grad)
        if numbers:
            torch.manual_seed(seed)  # the same dropout for all variants
            _train(variant, task, settings)
        values: Values = {"score": task.score(variant, "test"), "numbers": float(numbers)}
        if trained != NOTHING:
            values["validation"] = task.score(variant, "validation")
        if task.predict is not None:
            values["right"] = [float(right) for right in task.predict(variant)]
    return values | {
        "chosen heads": float(len(plan.heads or ())),
        "checked gain": found["gain"],
        "checked gain without recurrence": found["gain_without_recurrence"],
    }


def _load(settings: Settings) -> tuple[PreTrainedModel, Any]:
    torch.manual_seed(settings["seed"])  # of a classifier's new head
    return load_pretrained(settings["model"], settings["layers"], settings["pretraining_steps"], SCHEDULE)


def _task(settings: Settings, tokenizer: Any) -> Task:
    data = {name: settings[name] for name in ("share", "most", "scored", "length", "seed")}
    if settings["task"] == DEVIGN:
        return defect_task(tokenizer, **data)
    return text_task(settings["task"], tokenizer, **data, measure="nats per token", test_seed=settings["seed"])


def _calibration(settings: Settings, model: PreTrainedModel, task: Task) -> Mapping[str, Any]:
    """What `run_calibration` has found on rows of the training data; the same for all variants."""
    names = ("model", "task", "share", "length", "rows", "seed", "layers", "pretraining_steps", "most")

    def calibrate(path: Path) -> None:
        chosen = torch.randperm(len(task.rows), generator=torch.Generator().manual_seed(settings["seed"]))
        rows = [task.rows[i] for i in chosen[: settings["rows"]].tolist()]
        batches = [task.collate(rows[i : i + 4]) for i in range(0, len(rows), 4)]
        batches = [{**batch} for batch in batches]
        found = run_calibration(
            model.to(default_device()),  # type: ignore[arg-type]
            batches,
            max_rows=settings["rows"],
            seed=settings["seed"],
            progress=False,
        )
        names = ("config", "gain", "gain_error", "gain_without_recurrence")
        path.write_text(json.dumps({name: found.to_dict()[name] for name in names}) + "\n", encoding="utf-8")

    path = kept(f"calibration-{settings['model']}", {name: settings[name] for name in names}, ".json", calibrate)
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _with_lora(variant: str, model: PreTrainedModel, plan: RSAConfig) -> Any:
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK)
    if variant == PLAIN:
        return peft.get_peft_model(model, config)
    return rsa_hf.peft.get_peft_model(model, config, plan)


def _freeze_weights(model: nn.Module, variant: str, trained: str) -> None:
    """Leave the numbers of RSA heads, or of a PEFT adapter, to be trained; or nothing."""
    if trained == NUMBERS and variant in (LORA, IA3):
        return
    numbers = {p for m in model.modules() if isinstance(m, RSAHeads) for p in m.parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(trained == NUMBERS and parameter in numbers)


def _train(model: nn.Module, task: Task, settings: Settings) -> None:
    """AdamW, weight decay 0.01 on matrices; the learning rate warms up over a tenth of the steps and falls to 0."""
    steps = settings["steps"]
    optimizer = torch.optim.AdamW(param_groups(model, settings["learning_rate"], weight_decay=0.01))
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
    loss = batch_loss(model, task.rows, settings["batch"], settings["seed"], task.collate)

    def stop_if_diverged(step: int, value: Tensor) -> bool:
        return not math.isfinite(float(value))

    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=stop_if_diverged)
