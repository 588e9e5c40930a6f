"""The table of attention classes that do not use the attention interface, and how a method of each is wrapped."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rsa_hf.heads import heads_of
from rsa_hf.integration.architectures.mixing import Run, is_watched, mix_recurrence
from rsa_hf.integration.architectures.own_method import run_attn, run_gpt2, run_gpt_neo, run_openai_gpt, run_xlnet
from rsa_hf.integration.architectures.through_cache import through_cache_and_projection, through_cache_and_return
from rsa_hf.integration.architectures.through_projection import (
    deberta_values,
    from_projection_to_return,
    heads_of_states,
    run_mpnet,
)
from rsa_hf.utils.versions import what_fits

__all__ = ["ARCHITECTURES", "NO_SOFTMAX_ATTENTION", "Architecture", "architecture_of", "connect"]


@dataclass(frozen=True)
class Architecture:
    """One class of attention modules.

    Attributes:
        module: the module of transformers that defines it, below `transformers.models`.
        name: name of the class.
        method: the method that is wrapped.
        parameters: parameters of the method that `run` reads: Q, K, V, the cache, the mask.
        attributes: attributes of the instances that `run` reads or replaces.
        run: takes the attention module, the original method, its arguments by name, and `mix`. Runs the method with
            the result of `mix` in place of the output of attention.
    """

    module: str
    name: str
    method: str
    parameters: tuple[str, ...]
    attributes: tuple[str, ...]
    run: Run = field(repr=False)

    @property
    def path(self) -> str:
        """Full name of the module."""
        return f"transformers.models.{self.module}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        # Patched layers carry their row, so that unpickling one in a new process wraps its class there.
        return _unpickle, (self.path, self.name)


# By model type. Hybrids (Jamba, Bamba, Zamba, …) are patched in their layers of softmax attention.
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


def _like_bert(module: str, name: str) -> Architecture:
    """BERT's former self-attention: one forward for encoders, decoders and cross-attention, the projection outside."""
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


def _like_bart(module: str, name: str) -> Architecture:
    """BART's former attention: one forward for encoders, decoders and cross-attention, the projection inside."""
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


def _like_gpt2(module: str, name: str) -> Architecture:
    """GPT-2's attention, which uses the interface except with `reorder_and_upcast_attn`."""
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
    _like_gpt2("decision_transformer.modeling_decision_transformer", "DecisionTransformerGPT2Attention"),
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
    _like_gpt2("gpt2.modeling_gpt2", "GPT2Attention"),
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
    _like_bert("megatron_bert.modeling_megatron_bert", "MegatronBertSelfAttention"),
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
    _like_bart("mvp.modeling_mvp", "MvpAttention"),
    Architecture(
        "openai.modeling_openai", "Attention", "_attn", ("q", "k", "v", "attention_mask"), (), run_openai_gpt
    ),
    _like_bert("rembert.modeling_rembert", "RemBertSelfAttention"),
    _like_bert("roformer.modeling_roformer", "RoFormerSelfAttention"),
    _like_bart("trocr.modeling_trocr", "TrOCRAttention"),
    _like_bart("xglm.modeling_xglm", "XGLMAttention"),
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


def _unpickle(path: str, name: str) -> Architecture:
    architecture = _BY_CLASS[path, name]
    _wrap_class(architecture)
    return architecture


def architecture_of(module: nn.Module) -> Architecture | None:
    """The row of an attention module's class; None if it has none."""
    for cls in type(module).__mro__:
        architecture = _BY_CLASS.get((cls.__module__, cls.__name__))
        if architecture is not None:
            return architecture
    return None


def connect(model: nn.Module) -> None:
    """Wrap the classes of a model's attention modules that have a row in the table, once in a process.

    Raises:
        RuntimeError: a class is not as expected; the message names the transformers versions that fit.
    """
    for module in model.modules():
        architecture = architecture_of(module)
        if architecture is None:
            continue
        missing = [name for name in architecture.attributes if not hasattr(module, name)]
        if missing:
            raise _unexpected(architecture, f"to have {', '.join(architecture.attributes)}", missing)
        _wrap_class(architecture)
        if architecture.method == "forward" and "_old_forward" in vars(module):
            # Accelerate's hooks keep the forward from before the class was wrapped.
            module._old_forward = type(module).forward.__get__(module)


def _wrap_class(architecture: Architecture) -> None:
    cls = getattr(importlib.import_module(architecture.path), architecture.name)
    original = vars(cls).get(architecture.method)
    if hasattr(original, "_rsa_hf_architecture"):
        return
    names = list(inspect.signature(original).parameters)[1:] if callable(original) else []
    missing = [name for name in architecture.parameters if name not in names]
    if not callable(original) or missing:
        expected = f"to define {architecture.method}({', '.join(architecture.parameters)})"
        raise _unexpected(architecture, expected, missing or [architecture.method])

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if heads_of(self) is None and not is_watched():
            return original(self, *args, **keywords)
        call = dict(zip(names, args, strict=False)) | keywords
        return architecture.run(self, original, call, functools.partial(mix_recurrence, self))

    method._rsa_hf_architecture = architecture  # type: ignore[attr-defined]
    setattr(cls, architecture.method, method)


def _unexpected(architecture: Architecture, expected: str, missing: list[str]) -> RuntimeError:
    return RuntimeError(
        f"{what_fits()} {architecture.path}.{architecture.name} was expected {expected}, but {', '.join(missing)} is "
        "missing. Install a transformers version that rsa_hf was tested with, or a newer rsa_hf."
    )
