"""Training: a thin layer over `transformers.Trainer`, and what a plain Trainer or an Accelerate loop can use of it.

The names below are imported on first use (PEP 562), so that one of them does not import all of transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsa_hf.training.arguments import ModelArguments, RSAArguments, RSATrainingArguments
    from rsa_hf.training.callbacks import RSACallback
    from rsa_hf.training.checkpoints import newest_whole_checkpoint
    from rsa_hf.training.fsdp import shard_rsa_heads
    from rsa_hf.training.optimizer import optimizer_cls_and_kwargs, param_groups
    from rsa_hf.training.rsa_trainer import RSATrainer

__all__ = [
    "ModelArguments",
    "RSAArguments",
    "RSACallback",
    "RSATrainer",
    "RSATrainingArguments",
    "newest_whole_checkpoint",
    "optimizer_cls_and_kwargs",
    "param_groups",
    "shard_rsa_heads",
]

_MODULES = {
    "arguments": ("ModelArguments", "RSAArguments", "RSATrainingArguments"),
    "callbacks": ("RSACallback",),
    "checkpoints": ("newest_whole_checkpoint",),
    "fsdp": ("shard_rsa_heads",),
    "optimizer": ("optimizer_cls_and_kwargs", "param_groups"),
    "rsa_trainer": ("RSATrainer",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
