"""Tiny random models of the architectures in `rsa_hf/integration/architectures/`, and how each computes V."""

import inspect

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention

from families import effect_of_later_tokens, tiny_config

HEADS, WIDTH, WINDOW = 8, 32, 4
HEAD_SIZE = WIDTH // HEADS
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_NARROW = {"input_embedding_size": 16, "output_embedding_size": 16}
_ALTERNATING = {"attention_types": [[["local", "global"], 1]], "window_size": WINDOW}
CONFIGS = {
    "bloom": ("bloom", {}),
    "codegen": ("codegen", {"rotary_dim": 2}),
    "deberta": ("deberta", _DEBERTA),
    "deberta_v2": ("deberta-v2", {**_DEBERTA, "conv_kernel_size": 3}),
    "falcon": ("falcon", {}),  # multi-query, rotary
    "falcon_alibi": ("falcon", {"alibi": True, "multi_query": False}),
    "falcon_grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    # With this setting and eager attention, GPT-2 bypasses the attention interface.
    "gpt2_upcast": ("gpt2", {"reorder_and_upcast_attn": True, "attn_implementation": "eager"}),
    "gpt_neo": ("gpt_neo", _ALTERNATING),
    "gpt_neox_japanese": ("gpt_neox_japanese", {"intermediate_multiple_size": 2}),
    "gptj": ("gptj", {"rotary_dim": 2}),
    "megatron_bert": ("megatron-bert", {}),
    "megatron_bert_causal": ("megatron-bert", {"is_decoder": True}),
    "mpnet": ("mpnet", {}),
    "mpt": ("mpt", {}),
    "openai": ("openai-gpt", {}),
    "rembert_causal": ("rembert", {**_NARROW, "is_decoder": True}),
    "roformer": ("roformer", {}),
    "roformer_causal": ("roformer", {"is_decoder": True}),
    "xglm": ("xglm", {"ffn_dim": 48}),
    "xlnet": ("xlnet", {"d_inner": 48, "d_head": HEAD_SIZE}),
    "xlnet_causal": ("xlnet", {"d_inner": 48, "d_head": HEAD_SIZE, "attn_type": "uni"}),
}


def config_of(name, **changes):
    model_type, settings = CONFIGS.get(name, (name, {}))
    return tiny_config(model_type, **{**settings, **changes})


def build_adapted(name, *, language_model=False, **changes):
    """Build a model with large weights, so that attention is far from uniform."""
    model = (AutoModelForCausalLM if language_model else AutoModel).from_config(config_of(name, **changes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # RoFormer's positions are a fixed table.
            if (parameter.dim() >= 2 or key.endswith("bias")) and "embed_positions" not in key:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


# transformers 5.17 gives these three decoders a bidirectional mask, so they cannot generate.
for _name in ("megatron_bert_causal", "rembert_causal", "roformer_causal"):
    if effect_of_later_tokens(build_adapted(_name)) > 0:
        del CONFIGS[_name]

_CLASSES = {"codegen": CodeGenAttention, "gptj": GPTJAttention}
# From transformers 5.24 on these go through the attention interface.
ADAPTED = sorted(name for name in CONFIGS if name not in _CLASSES or hasattr(_CLASSES[name], "_attn"))
_BIDIRECTIONAL = ("deberta", "deberta_v2", "megatron_bert", "mpnet", "roformer", "xlnet")
CAUSAL = [name for name in ADAPTED if name not in (*_BIDIRECTIONAL, "xlnet_causal")]
# A plain causal XLNet fails on padding in transformers.
PADDED = [name for name in ADAPTED if name != "xlnet_causal"]


def accepted(model, inputs):
    """Keep the inputs that the model's forward takes."""
    names = inspect.signature(model.forward).parameters
    return {key: value for key, value in inputs.items() if key in names}


def attention_modules(model):
    base = model.base_model
    return [base.get_submodule(name) for name in base.config.rsa["modules"]]


def values_from(name, module, states):
    """Compute V, [B, S, H, D], from the input of an attention module, by the layout of its architecture."""
    B, S = states.shape[:2]
    heads = (B, S, HEADS, HEAD_SIZE)
    if name in ("gpt_neo", "gptj", "xglm"):
        return module.v_proj(states).view(heads)
    if name == "codegen":
        # Four blocks, each with Q, V and K of a quarter of the heads.
        return module.qkv_proj(states).view(B, S, 4, 3, HEADS // 4, HEAD_SIZE)[:, :, :, 1].reshape(heads)
    if name in ("bloom", "falcon_alibi", "gpt_neox_japanese"):
        return module.query_key_value(states).view(B, S, HEADS, 3, HEAD_SIZE)[:, :, :, 2]
    if name == "falcon":
        return module.query_key_value(states).view(B, S, HEADS + 2, HEAD_SIZE)[:, :, -1:].expand(heads)
    if name == "falcon_grouped":
        value = module.query_key_value(states).view(B, S, 2, HEADS // 2 + 2, HEAD_SIZE)[:, :, :, -1]
        return value.repeat_interleave(HEADS // 2, dim=2)
    if name == "deberta":
        value = module.in_proj(states).view(B, S, HEADS, 3, HEAD_SIZE)[:, :, :, 2]
        return value + module.v_bias.view(HEADS, HEAD_SIZE)
    if name == "deberta_v2":
        return module.value_proj(states).view(heads)
    if name.startswith(("megatron_bert", "rembert", "roformer")):
        return module.value(states).view(heads)
    if name == "mpnet":
        return module.v(states).view(heads)
    if name in ("gpt2_upcast", "openai", "mpt"):
        return (module.Wqkv if name == "mpt" else module.c_attn)(states)[..., 2 * WIDTH :].view(heads)
    return torch.einsum("bsw,whd->bshd", states, module.v)  # XLNet


def output_from(name, module, states, residual, mixed):
    """Compute what an attention module returns in evaluation mode for its heads' mixed output, [B, T, H, D]."""
    if name.startswith(("deberta", "megatron_bert", "rembert", "roformer")):
        return mixed.flatten(2)
    if name.startswith("xlnet"):
        return module.layer_norm(torch.einsum("bthd,whd->btw", mixed, module.o) + states)
    [projection] = [getattr(module, name) for name in ("dense", "out_proj", "c_proj", "o") if hasattr(module, name)]
    return projection(mixed.flatten(2)) + (residual if name == "bloom" else 0)
