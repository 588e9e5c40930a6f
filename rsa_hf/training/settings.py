"""The settings of a training run: which model, which RSA heads, how it is trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rsa_hf.config import RSAConfig

__all__ = ["ModelSettings", "RunConfig", "TrainingSettings"]

DataSettings = TypeVar("DataSettings")


@dataclass
class ModelSettings:
    """The model before RSA heads are put on it: pretrained (`name_or_path`) or from scratch (`model_type`).

    Attributes:
        name_or_path: a model's name on the Hub, a local folder, or `package:NAME/FOLDER`, a folder inside an
            installed Python package.
        model_type: one of transformers' model types, such as "llama": random weights, sizes from
            `config_overrides`.
        config_overrides: entries of the model's own config to set, such as `hidden_size`.
        tokenizer: where the tokenizer comes from, written as `name_or_path` is; None: where the model does.
        attn_implementation: "sdpa", "eager" or another of transformers'; None: transformers' choice.

    Raises:
        ValueError: not exactly one of `name_or_path` and `model_type` is given.
    """

    name_or_path: str | None = None
    model_type: str | None = None
    config_overrides: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if (self.name_or_path is None) == (self.model_type is None):
            raise ValueError(
                f"name_or_path={self.name_or_path!r} and model_type={self.model_type!r}: set one of the two "
                "(name_or_path for a pretrained model, model_type for one from scratch), the other to null."
            )


@dataclass
class TrainingSettings:
    """How a model is trained, and where what comes of it goes.

    Attributes:
        output_dir: receives `metrics.jsonl`, `checkpoints/`, `best/` with its step in `best.json`, and `final/`.
        learning_rate: AdamW's learning rate of the weights at its highest.
        rsa_learning_rate: the same for gates and rates; None: `parameter_scale` times `learning_rate`.
        weight_decay: for matrices; biases, norms and RSA parameters are never decayed.
        epochs: passes over the training set; not read where `max_steps` is set.
        max_steps: optimiser steps in all; None: as many as `epochs` takes. Needed where the data is streamed.
        batch_size: examples per process and micro-batch.
        eval_batch_size: examples per batch of an evaluation.
        gradient_accumulation_steps: micro-batches per optimiser step.
        warmup_ratio: share of all steps during which the rate rises from 0.
        lr_schedule: what the rate does after that.
        max_grad_norm: gradients are scaled down to this norm; None: never.
        class_weights: for classification: let both classes count the same in the loss, however rare one is.
        mixed_precision: "no", "bf16" or "fp16".
        gradient_checkpointing: compute activations again in the backward pass, for memory.
        seed: of the model's new weights, the data order and dropout.
        log_every_steps: a line in `metrics.jsonl` so often.
        eval_every_steps: an evaluation so often; None: at the end of each epoch, which streams do not have. And one at
            the end.
        save_every_steps: a checkpoint so often; None: after each evaluation. And one at the end.
        resume: "auto" goes on from the newest checkpoint in `output_dir`, where there is one; "never" starts
            over and deletes the checkpoints there; else the path of a checkpoint, and those after it are deleted.

    Raises:
        ValueError: a value is outside its range.
    """

    output_dir: str = "outputs/run"
    learning_rate: float = 2e-5
    rsa_learning_rate: float | None = None
    weight_decay: float = 0.01
    epochs: float = 3.0
    max_steps: int | None = None
    batch_size: int = 16
    eval_batch_size: int = 64
    gradient_accumulation_steps: int = 1
    warmup_ratio: float = 0.1
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    max_grad_norm: float | None = 1.0
    class_weights: bool = False
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    gradient_checkpointing: bool = False
    seed: int = 0
    log_every_steps: int = 10
    eval_every_steps: int | None = None
    save_every_steps: int | None = None
    resume: str = "auto"

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "eval_batch_size",
            "gradient_accumulation_steps",
            "log_every_steps",
            "max_steps",
            "eval_every_steps",
            "save_every_steps",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: a whole number ≥ 1 is needed.")
        for name in ("learning_rate", "rsa_learning_rate", "epochs", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: a positive number is needed.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay}: a number ≥ 0 is needed.")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio={self.warmup_ratio}: a number from 0 to 1 is needed.")
        # numpy, which Accelerate seeds too, takes 32 bits; a margin is left for the number of the process.
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed}: a whole number from 0 to 2147483647 is needed.")
        if not self.output_dir:
            raise ValueError("output_dir='': the name of a folder is needed.")


@dataclass
class RunConfig(Generic[DataSettings]):
    """Everything that decides a run.

    Attributes:
        model: the model before RSA heads are put on it.
        rsa: the RSA heads; None: the plain model.
        data: the settings of the task's data, a dataclass of the task.
        training: how it is trained.
    """

    model: ModelSettings
    rsa: RSAConfig | None
    data: DataSettings
    training: TrainingSettings

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain mappings, lists, numbers and strings."""
        data: Any = self.data
        return {
            "model": asdict(self.model),
            "rsa": None if self.rsa is None else self.rsa.to_dict(),
            "data": asdict(data),
            "training": asdict(self.training),
        }
