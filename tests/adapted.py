"""Tiny random models of the architectures in `rsa_hf/adapters.py`, and what each of them makes V from."""

import inspect

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    DebertaConfig,
    DebertaV2Config,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    MptConfig,
    XLNetConfig,
)

from families import VOCAB

HEADS, WIDTH, LAYERS, WINDOW = 8, 32, 2, 4
HEAD_SIZE = WIDTH // HEADS
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "n_inner": 48}
_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
}
_FALCON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_XLNET = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 48}

CONFIGS = {
    "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **_SPECIAL),
    "codegen": lambda: CodeGenConfig(**_GPT, rotary_dim=2, **_SPECIAL),
    "deberta": lambda: DebertaConfig(**_BERT, **_SPECIAL),
    "deberta_v2": lambda: DebertaV2Config(**_BERT, conv_kernel_size=3, **_SPECIAL),
    "falcon": lambda: FalconConfig(**_FALCON, **_SPECIAL),  # multi-query, rotary
    "falcon_alibi": lambda: FalconConfig(**_FALCON, alibi=True, multi_query=False, **_SPECIAL),
    "falcon_grouped": lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2, **_SPECIAL),
    "gpt_neo": lambda: GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        attention_types=[[["local", "global"], 1]],
        window_size=WINDOW,
        max_position_embeddings=64,
        intermediate_size=48,
        **_SPECIAL,
    ),
    "gptj": lambda: GPTJConfig(**_GPT, rotary_dim=2, **_SPECIAL),
    "mpt": lambda: MptConfig(
        vocab_size=VOCAB, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64, **_SPECIAL
    ),
    "xlnet": lambda: XLNetConfig(**_XLNET, **_SPECIAL),
    "xlnet_causal": lambda: XLNetConfig(**_XLNET, attn_type="uni", **_SPECIAL),
}
ADAPTED = sorted(CONFIGS)
CAUSAL = [name for name in ADAPTED if not name.startswith(("deberta", "xlnet"))]
# Those that have no alibi and no windows, and Bloom, run on static caches in transformers.
STATIC = ["bloom", "codegen", "falcon", "falcon_grouped", "gptj"]
# A causal XLNet cannot be run with padding, in transformers itself.
PADDED = [name for name in ADAPTED if name != "xlnet_causal"]


def build_adapted(name, *, language_model=False, **changes):
    """A model whose attention is far from uniform."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = (AutoModelForCausalLM if language_model else AutoModel).from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2 or key.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def accepted(model, inputs):
    """Those inputs that the model takes."""
    names = inspect.signature(model.forward).parameters
    return {key: value for key, value in inputs.items() if key in names}


def attention_modules(model):
    base = model.base_model
    return [base.get_submodule(name) for name in base.config.rsa["modules"]]


def values_from(name, module, states):
    """V, [B, S, H, D], from the input of an attention module: each architecture's own layout, written out."""
    B, S = states.shape[:2]
    if name == "gpt_neo" or name == "gptj":
        return module.v_proj(states).view(B, S, HEADS, HEAD_SIZE)
    if name == "codegen":
        # Four blocks, each with Q, V and K of a quarter of the heads.
        return module.qkv_proj(states).view(B, S, 4, 3, HEADS // 4, HEAD_SIZE)[:, :, :, 1].reshape(B, S, HEADS, -1)
    if name in ("bloom", "falcon_alibi"):
        return module.query_key_value(states).view(B, S, HEADS, 3, HEAD_SIZE)[:, :, :, 2]
    if name == "falcon":
        value = module.query_key_value(states).view(B, S, HEADS + 2, HEAD_SIZE)[:, :, -1:]
        return value.expand(B, S, HEADS, HEAD_SIZE)
    if name == "falcon_grouped":
        value = module.query_key_value(states).view(B, S, 2, HEADS // 2 + 2, HEAD_SIZE)[:, :, :, -1]
        return value.repeat_interleave(HEADS // 2, dim=2)
    if name == "mpt":
        return module.Wqkv(states)[..., 2 * WIDTH :].view(B, S, HEADS, HEAD_SIZE)
    if name == "deberta":
        value = module.in_proj(states).view(B, S, HEADS, 3, HEAD_SIZE)[:, :, :, 2]
        return value + module.v_bias.view(HEADS, HEAD_SIZE)
    if name == "deberta_v2":
        return module.value_proj(states).view(B, S, HEADS, HEAD_SIZE)
    return torch.einsum("bsw,whd->bshd", states, module.v)  # XLNet


def output_from(name, module, states, residual, mixed):
    """What an attention module returns for the mixed output of its heads, [B, T, H, D], in evaluation mode."""
    if name.startswith("deberta"):
        return mixed.flatten(2)
    if name.startswith("xlnet"):
        return module.layer_norm(torch.einsum("bthd,whd->btw", mixed, module.o) + states)
    projection = module.dense if hasattr(module, "dense") else module.out_proj
    return projection(mixed.flatten(2)) + (residual if name == "bloom" else 0)
