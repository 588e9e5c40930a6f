"""The settings of a training run, as dataclasses."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rsa_hf.config import RSAConfig

__all__ = ["ModelSettings", "RunConfig", "TrainingSettings"]

DataSettings = TypeVar("DataSettings")


@dataclass
class ModelSettings:
    """The model to train, before it is patched: pretrained (`name_or_path`) or from scratch (`model_type`).

    Args:
        name_or_path: name on the Hub, local folder, or `package:NAME/FOLDER`, a folder in an installed package.
        model_type: a model type of transformers, such as "llama", with random weights and sizes from
            `config_overrides`.
        config_overrides: entries of the model's config to change, such as `hidden_size`.
        tokenizer: source of the tokenizer, written as `name_or_path` is; None: the same as the model's.
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
    """How the model is trained, and the folder for the results.

    Args:
        output_dir: folder for `metrics.jsonl`, `checkpoints/`, `best/` (its step is in `best.json`) and `final/`.
        learning_rate: AdamW's learning rate of the weights, at its peak.
        rsa_learning_rate: learning rate of gates and rates; None: `parameter_scale` times `learning_rate`.
        weight_decay: weight decay of matrices; biases, norms and RSA parameters are never decayed.
        epochs: passes over the training set; ignored if `max_steps` is set.
        max_steps: number of optimiser steps; None: as many as `epochs` takes. Required for streamed data.
        batch_size: examples per process and micro-batch.
        eval_batch_size: examples per batch in evaluation.
        gradient_accumulation_steps: micro-batches per optimiser step.
        warmup_ratio: fraction of all steps in which the learning rate rises from 0.
        lr_schedule: schedule of the learning rate after the warmup.
        max_grad_norm: maximum norm of the gradient; None: no clipping.
        class_weights: in classification, weight the loss so that each class has the same total weight.
        mixed_precision: "no", "bf16" or "fp16".
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        seed: seed of new weights, data order and dropout.
        log_every_steps: write a line into `metrics.jsonl` every N steps.
        eval_every_steps: evaluate every N steps, and at the end; None: after each epoch. Streamed data has no epochs.
        save_every_steps: save a checkpoint every N steps, and at the end; None: after each evaluation.
        resume: "auto" continues from the newest checkpoint in `output_dir` if there is one; "never" starts over and
            deletes the checkpoints there; a path continues from that checkpoint and deletes newer ones.

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
        # numpy takes seeds of 32 bits, and Accelerate adds the index of the process.
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed}: a whole number from 0 to 2147483647 is needed.")
        if not self.output_dir:
            raise ValueError("output_dir='': the name of a folder is needed.")


@dataclass
class RunConfig(Generic[DataSettings]):
    """All settings of a run.

    Attributes:
        model: the model to train.
        rsa: the RSA heads; None: the plain model.
        data: the task's data, a dataclass of the task.
        training: how the model is trained.
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
