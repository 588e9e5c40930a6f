"""Training: a plain `transformers.Trainer` with RSA heads, and the loop on Accelerate of `rsa-hf train`.

The public names below are imported on first use, so that importing one of them does not import all of transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsa_hf.training.arguments import ConfigError, read_run_config
    from rsa_hf.training.fsdp import shard_rsa_heads
    from rsa_hf.training.loop import TrainingDivergedError, TrainResult, train
    from rsa_hf.training.optimizer import optimizer_cls_and_kwargs, param_groups
    from rsa_hf.training.run import load_model, predict_logits
    from rsa_hf.training.search import FoundPlan, head_plan_space, search_head_plans
    from rsa_hf.training.settings import ModelSettings, RunConfig, TrainingSettings
    from rsa_hf.training.trainer import RSACallback, newest_whole_checkpoint

__all__ = [
    "ConfigError",
    "FoundPlan",
    "ModelSettings",
    "RSACallback",
    "RunConfig",
    "TrainResult",
    "TrainingDivergedError",
    "TrainingSettings",
    "head_plan_space",
    "load_model",
    "newest_whole_checkpoint",
    "optimizer_cls_and_kwargs",
    "param_groups",
    "predict_logits",
    "read_run_config",
    "search_head_plans",
    "shard_rsa_heads",
    "train",
]

_MODULES = {
    "arguments": ("ConfigError", "read_run_config"),
    "fsdp": ("shard_rsa_heads",),
    "loop": ("TrainResult", "TrainingDivergedError", "train"),
    "optimizer": ("optimizer_cls_and_kwargs", "param_groups"),
    "run": ("load_model", "predict_logits"),
    "search": ("FoundPlan", "head_plan_space", "search_head_plans"),
    "settings": ("ModelSettings", "RunConfig", "TrainingSettings"),
    "trainer": ("RSACallback", "newest_whole_checkpoint"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"rsa_hf.training.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
