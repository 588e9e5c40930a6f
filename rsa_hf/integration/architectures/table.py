"""The table of adapters, and which of them a module or a model has."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from torch import nn

from rsa_hf.integration.architectures.own_method import run_attn, run_gpt2, run_gpt_neo, run_openai_gpt, run_xlnet
from rsa_hf.integration.architectures.through_cache import through_cache_and_projection, through_cache_and_return
from rsa_hf.integration.architectures.through_projection import (
    deberta_values,
    from_projection_to_return,
    heads_of_states,
    run_mpnet,
)
from rsa_hf.integration.architectures.wrapping import Architecture, require_attributes, wrap_class

__all__ = ["ARCHITECTURES", "NO_SOFTMAX_ATTENTION", "architecture_of", "connect", "has_architectures"]

# By model type. Hybrids that also have layers of softmax attention (Jamba, Bamba, Zamba, …) are patched in those.
NO_SOFTMAX_ATTENTION = {
    "falcon_mamba": "its layers are state-space models",
    "fnet": "its layers mix tokens by Fourier transforms",
    "mamba": "its layers are state-space models",
    "mamba2": "its layers are state-space models",
    "rwkv": "its layers are recurrent, with a weighted average of the past in place of attention",
    "xlstm": "its layers are recurrent",
}

_FORWARD = ("hidden_states", "attention_mask")
_QKV = ("query", "key", "value", "attention_mask")


def _of_bert_s_kin(module: str, name: str) -> Architecture:
    """Self-attention as BERT had it: a forward for encoders, decoders and cross-attention, the projection outside."""
    return Architecture(
        module,
        name,
        "forward",
        (*_FORWARD, "encoder_hidden_states", "past_key_values"),
        ("num_attention_heads", "is_decoder"),
        through_cache_and_return(
            "past_key_values", "num_attention_heads", decoder="is_decoder", others="encoder_hidden_states"
        ),
    )


def _of_bart_s_kin(module: str, name: str) -> Architecture:
    """Attention as BART had it: a forward for encoders, decoders and cross-attention, the projection inside."""
    return Architecture(
        module,
        name,
        "forward",
        (*_FORWARD, "key_value_states", "past_key_values"),
        ("num_heads", "out_proj", "is_decoder"),
        through_cache_and_projection(
            "past_key_values", "num_heads", "out_proj", decoder="is_decoder", others="key_value_states"
        ),
    )


def _of_gpt2_s_kin(module: str, name: str) -> Architecture:
    """Attention as GPT-2 has it, which asks for the interface but for one setting (`reorder_and_upcast_attn`)."""
    return Architecture(module, name, "_upcast_and_reordered_attn", _QKV, ("is_cross_attention",), run_gpt2)


ARCHITECTURES = (
    Architecture(
        "bloom.modeling_bloom",
        "BloomAttention",
        "forward",
        (*_FORWARD, "layer_past"),
        ("num_heads", "dense"),
        through_cache_and_projection("layer_past", "num_heads", "dense"),
    ),
    Architecture("codegen.modeling_codegen", "CodeGenAttention", "_attn", _QKV, (), run_attn),
    Architecture(
        "deberta.modeling_deberta",
        "DisentangledSelfAttention",
        "forward",
        _FORWARD,
        ("num_attention_heads", "in_proj", "transpose_for_scores", "v_bias"),
        from_projection_to_return("in_proj", deberta_values),
    ),
    Architecture(
        "deberta_v2.modeling_deberta_v2",
        "DisentangledSelfAttention",
        "forward",
        _FORWARD,
        ("num_attention_heads", "value_proj"),
        from_projection_to_return("value_proj", heads_of_states),
    ),
    _of_gpt2_s_kin("decision_transformer.modeling_decision_transformer", "DecisionTransformerGPT2Attention"),
    Architecture(
        "falcon.modeling_falcon",
        "FalconAttention",
        "forward",
        (*_FORWARD, "layer_past"),
        ("num_heads", "dense"),
        through_cache_and_projection("layer_past", "num_heads", "dense"),
    ),
    Architecture(
        "falcon.modeling_falcon",
        "FalconFlashAttention2",
        "forward",
        (*_FORWARD, "layer_past", "position_ids"),
        ("num_heads", "dense"),
        through_cache_and_projection("layer_past", "num_heads", "dense", positions=True),
    ),
    _of_gpt2_s_kin("gpt2.modeling_gpt2", "GPT2Attention"),
    Architecture(
        "gpt_neo.modeling_gpt_neo", "GPTNeoSelfAttention", "_attn", _QKV, ("attention_type", "config"), run_gpt_neo
    ),
    Architecture(
        "gpt_neo.modeling_gpt_neo",
        "GPTNeoFlashAttention2",
        "forward",
        (*_FORWARD, "layer_past"),
        ("num_heads", "out_proj"),
        through_cache_and_projection("layer_past", "num_heads", "out_proj"),
    ),
    Architecture(
        "gpt_neox_japanese.modeling_gpt_neox_japanese", "GPTNeoXJapaneseAttention", "_attn", _QKV, (), run_attn
    ),
    Architecture("gptj.modeling_gptj", "GPTJAttention", "_attn", _QKV, (), run_attn),
    Architecture(
        "gptj.modeling_gptj",
        "GPTJFlashAttention2",
        "forward",
        (*_FORWARD, "layer_past"),
        ("num_attention_heads", "out_proj"),
        through_cache_and_projection("layer_past", "num_attention_heads", "out_proj"),
    ),
    Architecture(
        "informer.modeling_informer",
        "InformerProbSparseAttention",
        "forward",
        (*_FORWARD, "past_key_values"),
        ("num_heads", "out_proj", "is_decoder"),
        through_cache_and_projection("past_key_values", "num_heads", "out_proj", decoder="is_decoder"),
    ),
    _of_bert_s_kin("megatron_bert.modeling_megatron_bert", "MegatronBertSelfAttention"),
    Architecture(
        "mpnet.modeling_mpnet", "MPNetSelfAttention", "forward", _FORWARD, ("num_attention_heads", "v", "o"), run_mpnet
    ),
    Architecture(
        "mpt.modeling_mpt",
        "MptAttention",
        "forward",
        (*_FORWARD, "past_key_values"),
        ("n_heads", "out_proj"),
        through_cache_and_projection("past_key_values", "n_heads", "out_proj", hides=True),
    ),
    _of_bart_s_kin("mvp.modeling_mvp", "MvpAttention"),
    Architecture(
        "openai.modeling_openai", "Attention", "_attn", ("q", "k", "v", "attention_mask"), (), run_openai_gpt
    ),
    _of_bert_s_kin("rembert.modeling_rembert", "RemBertSelfAttention"),
    _of_bert_s_kin("roformer.modeling_roformer", "RoFormerSelfAttention"),
    _of_bart_s_kin("trocr.modeling_trocr", "TrOCRAttention"),
    _of_bart_s_kin("xglm.modeling_xglm", "XGLMAttention"),
    Architecture(
        "xlnet.modeling_xlnet",
        "XLNetRelativeAttention",
        "rel_attn_core",
        ("v_head_h", "k_head_r", "attn_mask"),
        (),
        run_xlnet,
    ),
)
_BY_CLASS = {(architecture.path, architecture.name): architecture for architecture in ARCHITECTURES}
_MODULES = {architecture.path for architecture in ARCHITECTURES}


def architecture_of(module: nn.Module) -> Architecture | None:
    """The adapter of an attention module; None where it needs or has none."""
    for cls in type(module).__mro__:
        architecture = _BY_CLASS.get((cls.__module__, cls.__name__))
        if architecture is not None:
            return architecture
    return None


def connect(model: nn.Module) -> None:
    """Wrap the classes of those attention modules of a model that have an adapter; once in a process.

    Raises:
        RuntimeError: such a module is not as expected; the message names the transformers versions that are.
    """
    for module in model.modules():
        architecture = architecture_of(module)
        if architecture is not None:
            require_attributes(architecture, module)
            wrap_class(architecture)


def has_architectures(model: nn.Module) -> bool:
    """Whether a model's own class comes from a module of transformers that adapters are for."""
    return type(model).__module__ in _MODULES


def _wrapped_architecture(path: str, name: str) -> Architecture:
    architecture = _BY_CLASS[path, name]
    wrap_class(architecture)
    return architecture


def _by_name(architecture: Architecture) -> tuple[Callable[..., Any], tuple[str, str]]:
    return _wrapped_architecture, (architecture.path, architecture.name)


# Patched modules carry their adapter, so that one that is unpickled in a new process is connected there.
copyreg.pickle(Architecture, _by_name)
