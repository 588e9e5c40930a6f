"""What a variant of a pretrained model scores, after nothing, a few numbers, everything or LoRA was trained."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rsa_hf.peft
from experiments.byte_counts import bits_of_bytes
from experiments.calibrate.arms import (
    CALIBRATED_BIAS,
    LORA,
    ON_THE_ROWS,
    PLAIN,
    TOKEN_BIAS,
    TRIGRAMS,
    add_token_bias,
    make_variant,
)
from experiments.corpora import in_blocks, portion, read_splits, training_blocks
from experiments.pretrained import load_pretrained, pretraining_text
from experiments.runner.fit import adamw_linear_decay, batch_loss, default_device, fit
from experiments.runner.resources import cached
from experiments.runner.summary import Settings, Values
from rsa_hf import RSAConfig, RSAHeads
from rsa_hf.calibration import run_calibration
from rsa_hf.tasks.language_modeling import PreparedText
from rsa_hf.tasks.text_data import line_boundary
from rsa_hf.tasks.text_scores import evaluate_language_model

# What is trained.
NOTHING, NUMBERS, EVERYTHING, LORA_TRAINED = "nothing", "a few numbers", "everything", "lora"
BATCH = 4  # rows, in calibration
EVALUATION_TOKENS = 4096  # per batch; logits over a large vocabulary need much memory
LORA_RANK = 8
LORA_PARAMETER_SCALE = 5  # LoRA has its best rate at a few times that of all weights; gates would move too fast


def measure(settings: Settings) -> Values:
    """Train one variant and score it. With a seed all variants see the same data in the same order."""
    seed, trained, arm = settings["seed"], settings["trained"], settings["arm"]
    with torch.random.fork_rng():
        model, text, found = find_calibration(settings)
        weights = [float(int(found["weights"], 16))]
        plan = RSAConfig.from_dict(found["config"])
        torch.manual_seed(seed)
        if trained == LORA_TRAINED:
            variant = _with_lora(arm, model, plan)
        else:
            variant = make_variant(arm, model, plan)
            if trained != EVERYTHING and arm not in (LORA, *ON_THE_ROWS):
                _freeze_weights(variant, trained)
        variant = variant.to(default_device())
        rows = _rows_to_calibrate_on(text, settings)
        if arm in (TOKEN_BIAS, CALIBRATED_BIAS):
            add_token_bias(variant.eval(), DataLoader(rows, BATCH))
        numbers = sum(p.numel() for p in variant.parameters() if p.requires_grad)
        if numbers:
            _train(variant, rows if arm in ON_THE_ROWS else training_blocks(text), settings)
        score = _score_trigrams(text.test) if arm == TRIGRAMS else _score(variant, text.test)
        values: Values = {"score": score, "numbers": float(numbers), "weights": weights}
        if settings["steps"]:
            values["validation"] = _score(variant, text.validation)
    return values | {
        "chosen heads": float(len(plan.heads or ())),
        "checked gain": found["gain"],
        "checked gain without recurrence": found["gain_without_recurrence"],
    }


def find_calibration(settings: Settings) -> tuple[PreTrainedModel, PreparedText, Mapping[str, Any]]:
    """A pretrained model, its text, and what `run_calibration` finds on rows of it.

    That is computed once; `weights` is a digest of the model's weights.
    """
    model, tokenizer = load_pretrained(settings["model"], settings["pretraining_steps"], settings["seed"])
    text = _read_text(settings, tokenizer)

    def calibrate(path: Path) -> None:
        path.write_text(json.dumps(_calibrate(model, text, settings)) + "\n", encoding="utf-8")

    names = ("model", "task", "share", "length", "rows", "seed", "pretraining_steps", "most")
    weights = _digest(model)
    depends_on = {name: settings[name] for name in names} | {"weights": weights}
    path = cached(f"calibration-{settings['model']}", depends_on, ".json", calibrate)
    return model, text, json.loads(path.read_text(encoding="utf-8")) | {"weights": weights}


def _read_text(settings: Settings, tokenizer: PreTrainedTokenizerBase | None) -> PreparedText:
    """`wikitext-2`, or functions of `python` or `c`, in blocks of tokens, without a tokenizer of bytes.

    The seed chooses the share of the training text, of which `most` bytes count as all, and the test text. At most
    `scored` bytes of the validation and test text are scored.
    """
    task, seed, scored = settings["task"], settings["seed"], settings["scored"]
    texts = dict(read_splits("python functions" if task == "python" else task))
    train = texts["train"][: line_boundary(texts["train"], 0, settings["most"])]
    texts["train"] = portion(train, settings["share"], seed)
    texts["test"] = portion(texts["test"], min(1, scored / len(texts["test"])), seed)
    return in_blocks(texts, tokenizer, settings["length"], scored)


def _score(model: Any, text: Any) -> float:
    rows = max(1, EVALUATION_TOKENS // text.block_size)
    return evaluate_language_model(model, text, rows)["loss_nats_per_token"]


def _score_trigrams(text: Any) -> float:
    read = training_blocks(pretraining_text(text.block_size)).token_ids
    return float(bits_of_bytes(read, text.token_ids)[2].mean()) * math.log(2)


def _digest(model: nn.Module) -> str:
    """48 bits that tell a model's weights from others: pretrained again by other code, they differ by rounding."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def _rows_to_calibrate_on(text: PreparedText, settings: Settings) -> Any:
    """Random rows of the text to train on."""
    blocks: Any = training_blocks(text)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(settings["seed"]))
    return Subset(blocks, order[: settings["rows"]].tolist())


def _calibrate(model: PreTrainedModel, text: PreparedText, settings: Settings) -> dict[str, Any]:
    """What `run_calibration` finds on these rows."""
    model.to(default_device())  # type: ignore[arg-type]
    limits = {"max_rows": settings["rows"], "seed": settings["seed"]}
    batches: Any = DataLoader(_rows_to_calibrate_on(text, settings), BATCH)
    found = run_calibration(model, batches, **limits, progress=False).to_dict()
    return {name: found[name] for name in ("config", "gain", "gain_error", "gain_without_recurrence")}


def _with_lora(variant: str, model: PreTrainedModel, plan: RSAConfig) -> Any:
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK)
    if variant == PLAIN:
        return peft.get_peft_model(model, config)
    return rsa_hf.peft.get_peft_model(model, config, replace(plan, parameter_scale=LORA_PARAMETER_SCALE))


def _freeze_weights(model: nn.Module, trained: str) -> None:
    """Leave the numbers of RSA heads to be trained, or nothing."""
    numbers = {p for m in model.modules() if isinstance(m, RSAHeads) for p in m.parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(trained == NUMBERS and parameter in numbers)


def _train(model: nn.Module, rows: Any, settings: Settings) -> None:
    """Train in place; models from packages in mixed precision, in bfloat16."""
    steps = settings["steps"]
    torch.manual_seed(settings["seed"])  # the same dropout for all variants
    optimizer, schedule = adamw_linear_decay(model, settings["learning_rate"], steps)
    loss_of_batch = batch_loss(model, rows, settings["batch"], settings["seed"])
    precision = torch.autocast(default_device().type, torch.bfloat16, enabled=not settings["pretraining_steps"])

    def loss(step: int) -> Tensor:
        with precision:
            return loss_of_batch(step)

    def stop_if_diverged(step: int, value: Tensor) -> bool:
        return not math.isfinite(float(value))

    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=stop_if_diverged)
