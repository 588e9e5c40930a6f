"""Adapters on tiny models, for the tests of PEFT."""

import inspect

import peft
import pytest
import torch
import transformers.integrations.peft
from peft import IA3Config, LoraConfig, PromptTuningConfig
from transformers import PreTrainedModel

import rsa_hf.peft
from families import FULL_PLAN, build_language_model
from rsa_hf import RSAConfig

PLAN = RSAConfig(**FULL_PLAN)
METHODS = {
    "lora": lambda: LoraConfig(target_modules="all-linear"),
    "dora": lambda: LoraConfig(use_dora=True),
    "ia3": lambda: IA3Config(),
    "rsa only": lambda: None,
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}

# transformers 5.24 asks for PEFT 0.22 before that is released; what is tested here works with 0.21 all the same.
transformers.integrations.peft.MIN_PEFT_VERSION = peft.__version__
# An older version does not load modules_to_save, and rsa_hf raises (test_peft_guard.py).
needs_own_adapters = pytest.mark.skipif(
    "AuxiliaryTrainingWrapper" not in inspect.getsource(inspect.unwrap(PreTrainedModel.load_adapter)),
    reason="this transformers cannot load modules_to_save itself",
)


def base_model(family, seed=7):
    """Build a model, with the same weights on every call."""
    torch.manual_seed(seed)
    return build_language_model(family)


def disturb(model, seed=1):
    """Move all trainable parameters, as training does, gates and rates by a lot."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                size = 0.05 if ".rsa." in name else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model.eval()


def trained_adapter(family, method="lora", seed=1, plan=PLAN):
    """Build a model whose adapter is not at its initial values."""
    torch.manual_seed(0)
    return disturb(rsa_hf.peft.get_peft_model(base_model(family), METHODS[method](), plan), seed)


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def adapter_values(model):
    """The gates and rates of the first adapter, by name."""
    marker = ".rsa.modules_to_save.default."
    return {name: value.detach().clone() for name, value in model.named_parameters() if marker in name}
