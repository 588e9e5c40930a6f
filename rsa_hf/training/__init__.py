"""Training: a thin layer over `transformers.Trainer`. Parts of it also serve a plain Trainer or an Accelerate loop."""

from rsa_hf.training.arguments import ModelArguments, RSAArguments, RSATrainingArguments
from rsa_hf.training.callbacks import RSACallback
from rsa_hf.training.checkpoints import newest_whole_checkpoint
from rsa_hf.training.fsdp import shard_rsa_heads
from rsa_hf.training.model_setup import load_tokenizer, require_causal
from rsa_hf.training.optimizer import optimizer_cls_and_kwargs, param_groups
from rsa_hf.training.rsa_trainer import RSATrainer

__all__ = [
    "ModelArguments",
    "RSAArguments",
    "RSACallback",
    "RSATrainer",
    "RSATrainingArguments",
    "load_tokenizer",
    "newest_whole_checkpoint",
    "optimizer_cls_and_kwargs",
    "param_groups",
    "require_causal",
    "shard_rsa_heads",
]
