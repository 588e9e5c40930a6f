"""A tiny random model of any type in transformers' text mappings, and inputs for it.

A config is the type's default config with every size made small. `SIZES` recognises sizes by their names; `SPECIAL` has
what does not follow from names, one line per type.
"""

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from families import widen
from rsa_hf.models import MODEL_TYPES

VOCAB = 160
FIRST_TOKEN, LAST_TOKEN = 10, 99  # random texts have no special tokens
TEXT_LENGTH = 11
DECODER_LENGTH = 7  # differs from the encoder's, else cross-attention looks like self-attention

TASKS = {
    "causal-lm": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
    "masked-lm": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
    "sequence-classification": (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        transformers.AutoModelForSequenceClassification,
    ),
    "seq2seq": (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForSeq2SeqLM),
}

# The first pattern that matches the whole name of a setting gives its tiny value. Only larger whole numbers change.
SIZES: list[tuple[str, int | None]] = [
    (r".*vocab_size.*|num_centroids|.*vocab_size_base|.*group_vocab", VOCAB),
    (r"(encoder_|decoder_|text_)?(attention_)?(num_)?(n_)?heads?|n_heads|num_attention_heads|.*attention_heads", 4),
    (r"swa_num_attention_heads|linear_num_(key|value)_heads|index_n_heads|mamba_n(um)?_heads|n_mamba_heads", 4),
    (r".*(key_value_heads|kv_heads|kv_n_heads)", 2),
    (r"mamba_(d_head|head_dim|headdim)|linear_head_dim", 16),
    (r"qk_head_dim", None),  # the sum of two others
    (r"(.*_)?head_dim|kv_channels|d_kv|dim_head|rotary_dim", 8),
    (r".*(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|layers_per_stack)", 2),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|n_inner|mlp_dim|shared_expert_size).*", 48),
    (
        r"(.*_)?(hidden_size|hidden_size_global|d_model|n_embd|dim|hidden_dim|embedding_size|embed_dim|emb_size|embedding_dim|emb_dim)",
        32,
    ),
    (r".*lora_rank|.*lowrank|.*_rank", 8),
    (r"(.*_)?num_(local_|routed_)?experts|n_routed_experts|expert_capacity|zero_expert_num", 4),
    (r"(.*_)?experts_per_tok(en)?|moe_top_?k|moe_k|topk_group|n_group|num_expert_group|top_k_experts", 2),
    (r"sliding_window(_size)?|attention_chunk_size|local_attention_window_len", 6),
    (r"max_.*position_embeddings|n_positions|n_ctx|max_(source|target)_positions", 64),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_chunk_size|chunk_size", 16),
    (r"(.*_)?(image|audio|video|boi|eoi|boa|eoa|cls|sep|mask|bor|eor)_token_(id|index)", 120),
]
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# Settings whose default is None, or does not fit the other settings once they are small. A type that is part of others
# is listed once, under its own name.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"use_cache": False},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "num_key_value_heads": 4, "layer_types": ["indexed_attention", "sliding_attention"], "swa_q_lora_rank": 8,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_kv_lora_rank": 8, "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32},
    "dots3_note_vision_encoder": {"num_hidden_layers": 42, "adapter_in_dim": 32},  # some layers have special roles
    "dory": {
        "num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "led": {"attention_window": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 5},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 32,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 6},
    "reformer": {"axial_pos_embds": False, "is_decoder": False},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"]},
}  # fmt: skip

# Configs whose defaults are not valid, so that they cannot be made small.
_ASSISTANT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
}  # fmt: skip
WRITTEN_OUT: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_ASSISTANT}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **_ASSISTANT}},
}


@dataclass
class Case:
    """A tiny model for a key of `TASKS`, in evaluation mode, and the inputs of a forward pass."""

    model_type: str
    task: str
    model: transformers.PreTrainedModel
    inputs: dict[str, Tensor]


def model_types() -> list[str]:
    """Every type of transformers that has a class for one of the tasks, without the types of this package."""
    return sorted({name for names, _ in TASKS.values() for name in names} - set(MODEL_TYPES))


def tasks_of(model_type: str) -> list[str]:
    """The tasks that have a class for this type."""
    return [task for task, (names, _) in TASKS.items() if model_type in names]


def tiny_config(model_type: str) -> transformers.PreTrainedConfig:
    """The type's default config, made small."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    if model_type in WRITTEN_OUT:
        return config_class(**WRITTEN_OUT[model_type])
    return _tiny(config_class())


def _tiny(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    return type(config)(**{**_shrunk(config), **SPECIAL.get(config.model_type, {})})


def _shrunk(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """The settings of a config that must change for it to be tiny."""
    small: dict[str, Any] = {}
    chosen_by_user = {field.name for field in fields(config)}  # other attributes follow from these
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            small[name] = _tiny(value)
        elif name in SPECIAL_TOKENS:
            small[name] = SPECIAL_TOKENS[name]
        elif name == "vocab_size":
            small[name] = VOCAB
        elif name in ("is_decoder", "add_cross_attention") and value:
            small[name] = True
        elif name in chosen_by_user and type(value) is int and (size := _size(name)) is not None and size < value:
            small[name] = size
    settings = vars(config)
    if "num_attention_heads" in small and settings.get("num_key_value_heads") == settings["num_attention_heads"]:
        small["num_key_value_heads"] = small["num_attention_heads"]  # no grouped values if the default has none
    if config.is_encoder_decoder:
        small["decoder_start_token_id"] = 1
    layers, kinds = settings.get("num_hidden_layers"), settings.get("layer_types")
    if layers and kinds and "num_hidden_layers" in small:
        # One layer of each kind.
        chosen = [list(kinds).index(kind) for kind in dict.fromkeys(kinds)]
        chosen = sorted((chosen * 2)[: max(2, len(chosen))])
        small["num_hidden_layers"] = len(chosen)
        for name, value in vars(config).items():
            if isinstance(value, (list, tuple)) and len(value) == layers:
                small[name] = [value[i] for i in chosen]
    return small


def _size(name: str) -> int | None:
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size
    return None


def build(model_type: str, task: str) -> Case:
    """A tiny model with random weights and inputs for it; the same on every call."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    if task == "causal-lm" and "is_decoder" in vars(config):
        config.is_decoder = True  # else a model with a next-token head would see the next token
    model_class = TASKS[task][1]._model_mapping[type(config)]
    if not isinstance(config, model_class.config_class):  # the text part of a composite model
        config = next((part for part in vars(config).values() if isinstance(part, model_class.config_class)), config)
    model = model_class._from_config(config).eval()
    model.config.architectures, model.config.dtype = [model_class.__name__], "float32"  # as saving does
    widen(model)  # so that attention is far from uniform
    return Case(model_type, task, model, _inputs(model))


def _inputs(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    accepted = inspect.signature(model.forward).parameters
    inputs = {"input_ids": torch.randint(FIRST_TOKEN, LAST_TOKEN, (2, TEXT_LENGTH))}
    if "ForSequenceClassification" in type(model).__name__:
        inputs["input_ids"][:, -1] = SPECIAL_TOKENS["eos_token_id"]  # encoder-decoders classify at this token
    elif "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = torch.randint(FIRST_TOKEN, LAST_TOKEN, (2, DECODER_LENGTH))
    return inputs
