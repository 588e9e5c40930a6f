"""Models that transformers lacks, built as transformers models. Each folder has a configuration_ and a modeling_ file.

`import rsa_hf` registers them with the Auto classes.
"""

from importlib import import_module
from typing import Any

__all__ = ["MODEL_TYPES", "class_named", "register_all"]

# The folder of each model type.
MODEL_TYPES = {
    "block-recurrent": "block_recurrent",
    "recurrent": "recurrent",
    "recurrent_encoder_decoder": "recurrent_encoder_decoder",
    "sru_plus_plus": "sru_plus_plus",
    "temporal_latent_bottleneck": "temporal_latent_bottleneck",
    "transfo-xl": "transformer_xl",
}
# Class names of transformers 4, which its checkpoints contain.
_FORMER_NAMES = {
    "TransfoXLForSequenceClassification": "TransformerXLForSequenceClassification",
    "TransfoXLLMHeadModel": "TransformerXLForCausalLM",
    "TransfoXLModel": "TransformerXLModel",
}


def register_all() -> None:
    """Register the models with the Auto classes. Calling it again changes nothing."""
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM

    autos = {
        "Model": AutoModel,
        "ForCausalLM": AutoModelForCausalLM,
        "ForSequenceClassification": AutoModelForSequenceClassification,
        "ForConditionalGeneration": AutoModelForSeq2SeqLM,
    }
    for model_type in MODEL_TYPES:
        for name, model in _classes(model_type).items():
            config = model.config_class
            AutoConfig.register(model_type, config, exist_ok=True)
            head = name.removeprefix(config.__name__.removesuffix("Config"))
            autos[head].register(config, model, exist_ok=True)
            if head == "ForCausalLM":
                # The Trainer looks the name up here: label smoothing shifts labels only for these classes.
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = name


def class_named(name: str, model_type: object) -> type[Any] | None:
    """The class of this package that a checkpoint names; None for other model types and unknown names."""
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        return None
    return _classes(model_type).get(_FORMER_NAMES.get(name, name))


def _classes(model_type: str) -> dict[str, type[Any]]:
    """The model classes of a model type, by name."""
    folder = MODEL_TYPES[model_type]
    module = import_module(f"rsa_hf.models.{folder}.modeling_{folder}")
    return {name: getattr(module, name) for name in module.__all__}
