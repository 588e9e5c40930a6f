"""Training: a plain `transformers.Trainer` with RSA heads, and the loop on Accelerate of `rsa-hf train`.

The names below are imported on first use (PEP 562), so that one of them does not import all of transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsa_hf.training.arguments import ConfigError, ModelSettings, RunConfig, TrainingSettings, read_run_config
    from rsa_hf.training.fsdp import shard_rsa_heads
    from rsa_hf.training.optimizer import optimizer_cls_and_kwargs, param_groups
    from rsa_hf.training.run import TrainResult, load_model, predict_logits, train
    from rsa_hf.training.search import FoundPlan, head_plan_space, search_head_plans
    from rsa_hf.training.steps import TrainingDivergedError
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
    "arguments": ("ConfigError", "ModelSettings", "RunConfig", "TrainingSettings", "read_run_config"),
    "fsdp": ("shard_rsa_heads",),
    "optimizer": ("optimizer_cls_and_kwargs", "param_groups"),
    "run": ("TrainResult", "load_model", "predict_logits", "train"),
    "search": ("FoundPlan", "head_plan_space", "search_head_plans"),
    "steps": ("TrainingDivergedError",),
    "trainer": ("RSACallback", "newest_whole_checkpoint"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
