"""Models that transformers lacks, as transformers models, one folder each.

Importing a folder registers its Auto classes; a model type that an Auto class meets has its folder imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["MODEL_TYPES", "class_named", "register", "register_causal"]

# Each with its folder.
MODEL_TYPES = {
    "block-recurrent": "block_recurrent",
    "recurrent": "recurrent",
    "recurrent_encoder_decoder": "recurrent_encoder_decoder",
    "sru_plus_plus": "sru_plus_plus",
    "temporal_latent_bottleneck": "temporal_latent_bottleneck",
    "transfo-xl": "transformer_xl",
}
# What transformers 4 called a class: its checkpoints say so.
_FORMER_NAMES = {
    "TransfoXLForSequenceClassification": "TransformerXLForSequenceClassification",
    "TransfoXLLMHeadModel": "TransformerXLForCausalLM",
    "TransfoXLModel": "TransformerXLModel",
}


def register(model_type: object) -> None:
    """Import the folder of a model type of ours, which registers its Auto classes; nothing for any other."""
    if isinstance(model_type, str) and model_type in MODEL_TYPES:
        import_module(f"rsa_hf.models.{MODEL_TYPES[model_type]}")


def register_causal(config: type[Any], model: type[Any]) -> None:
    """Register a causal language model: for the Auto class, and for those that ask for its name.

    The Trainer does: label smoothing shifts the labels of classes that it finds by name alone. Those of any other are
    compared with the outputs of their own positions, and the model learns to repeat what it reads.

    Args:
        config: its configuration.
        model: the class.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM

    AutoModelForCausalLM.register(config, model)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = model.__name__


def class_named(name: str, model_type: object) -> type | None:
    """The class that a checkpoint of a model type of ours names; None for any other type, and where there is none."""
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        return None
    module = import_module(f"rsa_hf.models.{MODEL_TYPES[model_type]}")
    name = _FORMER_NAMES.get(name, name)
    return getattr(module, name) if name in module.__all__ else None
