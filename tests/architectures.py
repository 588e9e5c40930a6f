"""Tiny random models of the architectures in `rsa_hf/integration/architectures/`, and how each computes V."""

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
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXJapaneseConfig,
    MegatronBertConfig,
    MPNetConfig,
    MptConfig,
    OpenAIGPTConfig,
    RemBertConfig,
    RoFormerConfig,
    XGLMConfig,
    XLNetConfig,
)

from families import VOCAB

HEADS, WIDTH, LAYERS, WINDOW = 8, 32, 2, 4
HEAD_SIZE = WIDTH // HEADS
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "n_inner": 48}
_HIDDEN = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_BERT = {
    **_HIDDEN, "intermediate_size": 48, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_DEBERTA = {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_XLNET = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 48}
_GPT_NEO = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "window_size": WINDOW,
    "attention_types": [[["local", "global"], 1]], "max_position_embeddings": 64, "intermediate_size": 48,
}  # fmt: skip
_MPT = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64}
_OPENAI = {name: value for name, value in _GPT.items() if name != "n_inner"}
_XGLM = {
    "vocab_size": VOCAB, "d_model": WIDTH, "num_layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 48,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip

CONFIGS = {
    "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **_SPECIAL),
    "codegen": lambda: CodeGenConfig(**_GPT, rotary_dim=2, **_SPECIAL),
    "deberta": lambda: DebertaConfig(**_DEBERTA, **_SPECIAL),
    "deberta_v2": lambda: DebertaV2Config(**_DEBERTA, conv_kernel_size=3, **_SPECIAL),
    "falcon": lambda: FalconConfig(**_HIDDEN, **_SPECIAL),  # multi-query, rotary
    "falcon_alibi": lambda: FalconConfig(**_HIDDEN, alibi=True, multi_query=False, **_SPECIAL),
    "falcon_grouped": lambda: FalconConfig(**_HIDDEN, new_decoder_architecture=True, num_kv_heads=2, **_SPECIAL),
    # With this setting and eager attention, GPT-2 bypasses the attention interface.
    "gpt2_upcast": lambda: GPT2Config(**_GPT, reorder_and_upcast_attn=True, attn_implementation="eager", **_SPECIAL),
    "gpt_neo": lambda: GPTNeoConfig(**_GPT_NEO, **_SPECIAL),
    "gpt_neox_japanese": lambda: GPTNeoXJapaneseConfig(**_HIDDEN, intermediate_multiple_size=2, **_SPECIAL),
    "gptj": lambda: GPTJConfig(**_GPT, rotary_dim=2, **_SPECIAL),
    "megatron_bert": lambda: MegatronBertConfig(**_BERT, **_SPECIAL),
    "megatron_bert_causal": lambda: MegatronBertConfig(**_BERT, is_decoder=True, **_SPECIAL),
    "mpnet": lambda: MPNetConfig(**_BERT, **_SPECIAL),
    "mpt": lambda: MptConfig(**_MPT, **_SPECIAL),
    "openai": lambda: OpenAIGPTConfig(**_OPENAI, **_SPECIAL),
    "rembert_causal": lambda: RemBertConfig(
        **_BERT, input_embedding_size=16, output_embedding_size=16, is_decoder=True, **_SPECIAL
    ),
    "roformer": lambda: RoFormerConfig(**_BERT, **_SPECIAL),
    "roformer_causal": lambda: RoFormerConfig(**_BERT, is_decoder=True, **_SPECIAL),
    "xglm": lambda: XGLMConfig(**_XGLM, **_SPECIAL),
    "xlnet": lambda: XLNetConfig(**_XLNET, **_SPECIAL),
    "xlnet_causal": lambda: XLNetConfig(**_XLNET, attn_type="uni", **_SPECIAL),
}


def build_adapted(name, *, language_model=False, **changes):
    """Build a model with large weights, so that attention is far from uniform."""
    config = CONFIGS[name]()
    config.update(changes)
    model = (AutoModelForCausalLM if language_model else AutoModel).from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # RoFormer's positions are a fixed table.
            if (parameter.dim() >= 2 or key.endswith("bias")) and "embed_positions" not in key:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def _sees_the_future(name):
    model, ids = build_adapted(name), torch.arange(3, 11)[None]
    other = ids.clone()
    other[0, -1] = 3
    with torch.no_grad():
        return not torch.equal(model(ids)[0][0, 0], model(other)[0][0, 0])


# transformers 5.17 gives these three decoders a bidirectional mask, so they cannot generate.
for _name in ("megatron_bert_causal", "rembert_causal", "roformer_causal"):
    if _sees_the_future(_name):
        del CONFIGS[_name]

ADAPTED = sorted(CONFIGS)
_BIDIRECTIONAL = ("deberta", "deberta_v2", "megatron_bert", "mpnet", "roformer", "xlnet")
CAUSAL = [name for name in ADAPTED if name not in (*_BIDIRECTIONAL, "xlnet_causal")]
CACHED = [name for name in CAUSAL if name != "openai"]  # OpenAI-GPT has no cache
# transformers supports a static cache for Bloom, and for models without ALiBi or windows.
STATIC = ["bloom", "codegen", "falcon", "falcon_grouped", "gpt2_upcast", "gptj"]
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
