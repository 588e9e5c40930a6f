"""Attention modules that do not use transformers' attention interface: where their values, outputs and masks are.

`connect` in `integration/attention.py` wraps one method of each such class, once in a process, when a model is patched
or built from a config with a plan. The wrapper does nothing for a module without an `rsa` child. Otherwise it runs the
original method and mixes P V into the output of attention, before the output projection. An instance gets nothing but
its `rsa` child, so copies, pickles and wrapped or quantised projections work without special code.

There are three kinds of modules, by where V and the output of attention can be seen:

* own_method.py: a method that computes attention from Q, K and V: GPT-Neo, GPT-J, CodeGen, XLNet (both of its
  streams), OpenAI-GPT, GPT-NeoX-Japanese; GPT-2 and the Decision Transformer with `reorder_and_upcast_attn`;
* through_cache.py: a forward that passes K and V through the cache, and the output to a projection: Bloom, Falcon,
  MPT, MVP, TrOCR, XGLM, the Informer's ProbSparse attention, flash attention's versions of GPT-Neo, GPT-J and Falcon;
  or that returns the output: Megatron-BERT, RemBERT, RoFormer;
* through_projection.py: a forward that projects V, and returns the output: DeBERTa, DeBERTa-v2; or passes it to a
  projection: MPNet.

A new architecture of one of these kinds is a row of `ARCHITECTURES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rsa_hf.integration.architectures.own_method import run_attn, run_gpt2, run_gpt_neo, run_openai_gpt, run_xlnet
from rsa_hf.integration.architectures.stand_ins import Run
from rsa_hf.integration.architectures.through_cache import through_cache_and_projection, through_cache_and_return
from rsa_hf.integration.architectures.through_projection import (
    deberta_values,
    from_projection_to_return,
    heads_of_states,
    run_mpnet,
)

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True)
class Architecture:
    """One class of attention modules.

    Attributes:
        model: the model's folder in `transformers.models`; `path` is the full name of the module in it.
        name: name of the class.
        method: the method that is wrapped.
        parameters: parameters of the method that `run` reads: Q, K, V, the cache, the mask.
        attributes: attributes of the instances that `run` reads or replaces.
        run: takes the attention module, the original method, its arguments by name, and `mix`. Runs the method with
            the result of `mix` in place of the output of attention.
    """

    model: str
    name: str
    method: str
    parameters: tuple[str, ...]
    attributes: tuple[str, ...]
    run: Run = field(repr=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", f"transformers.models.{self.model}.modeling_{self.model}")


_FORWARD = ("hidden_states", "attention_mask")
_QKV = ("query", "key", "value", "attention_mask")


def _own_method(model: str, name: str, run: Run = run_attn, attributes: tuple[str, ...] = ()) -> Architecture:
    """A class whose method `_attn` computes attention from Q, K and V."""
    return Architecture(model, name, "_attn", _QKV, attributes, run)


def _with_projection(model: str, name: str, cache: str, heads: str, projection: str, **options: Any) -> Architecture:
    """A forward that passes K and V through the cache and the output to a projection; `options` are of its `run`."""
    parameters = [*_FORWARD, cache, *([options["others"]] if "others" in options else [])]
    parameters += ["position_ids"] if options.get("positions") else []
    attributes = [heads, projection, *([options["decoder"]] if "decoder" in options else [])]
    run = through_cache_and_projection(cache, heads, projection, **options)
    return Architecture(model, name, "forward", tuple(parameters), tuple(attributes), run)


def _like_bart(model: str, name: str) -> Architecture:
    """BART's former attention: one forward for encoders, decoders and cross-attention, the projection inside."""
    options = {"decoder": "is_decoder", "others": "key_value_states"}
    return _with_projection(model, name, "past_key_values", "num_heads", "out_proj", **options)


def _like_bert(model: str, name: str) -> Architecture:
    """BERT's former self-attention: one forward for encoders, decoders and cross-attention, the projection outside."""
    cache, heads, decoder, others = "past_key_values", "num_attention_heads", "is_decoder", "encoder_hidden_states"
    run = through_cache_and_return(cache, heads, decoder=decoder, others=others)
    return Architecture(model, name, "forward", (*_FORWARD, others, cache), (heads, decoder), run)


def _like_gpt2(model: str, name: str) -> Architecture:
    """GPT-2's attention, which uses the interface except with `reorder_and_upcast_attn`."""
    return Architecture(model, name, "_upcast_and_reordered_attn", _QKV, ("is_cross_attention",), run_gpt2)


ARCHITECTURES = (
    _with_projection("bloom", "BloomAttention", "layer_past", "num_heads", "dense"),
    _own_method("codegen", "CodeGenAttention"),
    Architecture(
        "deberta",
        "DisentangledSelfAttention",
        "forward",
        _FORWARD,
        ("num_attention_heads", "in_proj", "transpose_for_scores", "v_bias"),
        from_projection_to_return("in_proj", deberta_values),
    ),
    Architecture(
        "deberta_v2",
        "DisentangledSelfAttention",
        "forward",
        _FORWARD,
        ("num_attention_heads", "value_proj"),
        from_projection_to_return("value_proj", heads_of_states),
    ),
    _like_gpt2("decision_transformer", "DecisionTransformerGPT2Attention"),
    _with_projection("falcon", "FalconAttention", "layer_past", "num_heads", "dense"),
    _with_projection("falcon", "FalconFlashAttention2", "layer_past", "num_heads", "dense", positions=True),
    _like_gpt2("gpt2", "GPT2Attention"),
    _own_method("gpt_neo", "GPTNeoSelfAttention", run_gpt_neo, ("attention_type", "config")),
    _with_projection("gpt_neo", "GPTNeoFlashAttention2", "layer_past", "num_heads", "out_proj"),
    _own_method("gpt_neox_japanese", "GPTNeoXJapaneseAttention"),
    _own_method("gptj", "GPTJAttention"),
    _with_projection("gptj", "GPTJFlashAttention2", "layer_past", "num_attention_heads", "out_proj"),
    _with_projection(
        "informer", "InformerProbSparseAttention", "past_key_values", "num_heads", "out_proj", decoder="is_decoder"
    ),
    _like_bert("megatron_bert", "MegatronBertSelfAttention"),
    Architecture("mpnet", "MPNetSelfAttention", "forward", _FORWARD, ("num_attention_heads", "v", "o"), run_mpnet),
    _with_projection("mpt", "MptAttention", "past_key_values", "n_heads", "out_proj", hides=True),
    _like_bart("mvp", "MvpAttention"),
    Architecture("openai", "Attention", "_attn", ("q", "k", "v", "attention_mask"), (), run_openai_gpt),
    _like_bert("rembert", "RemBertSelfAttention"),
    _like_bert("roformer", "RoFormerSelfAttention"),
    _like_bart("trocr", "TrOCRAttention"),
    _like_bart("xglm", "XGLMAttention"),
    Architecture(
        "xlnet", "XLNetRelativeAttention", "rel_attn_core", ("v_head_h", "k_head_r", "attn_mask"), (), run_xlnet
    ),
)
