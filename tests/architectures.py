"""Tiny random models of `rsa_hf/integration/architectures/`, and what each of them makes V from."""

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
_OPENAI = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
_GPT = {**_OPENAI, "n_inner": 48}
_SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_BERT = {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 64}
_BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DEBERTA = {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_NEO = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "window_size": WINDOW}
_NEO |= {"attention_types": [[["local", "global"], 1]], "max_position_embeddings": 64, "intermediate_size": 48}
_MPT = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64}
_XGLM = {"vocab_size": VOCAB, "d_model": WIDTH, "num_layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 48}
_XGLM |= {"max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0}
_XLNET = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 48}

CONFIGS = {
    "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **_SPECIAL),
    "codegen": lambda: CodeGenConfig(**_GPT, rotary_dim=2, **_SPECIAL),
    "deberta": lambda: DebertaConfig(**_DEBERTA, **_SPECIAL),
    "deberta_v2": lambda: DebertaV2Config(**_DEBERTA, conv_kernel_size=3, **_SPECIAL),
    "falcon": lambda: FalconConfig(**_SIZES, **_SPECIAL),  # multi-query, rotary
    "falcon_alibi": lambda: FalconConfig(**_SIZES, alibi=True, multi_query=False, **_SPECIAL),
    "falcon_grouped": lambda: FalconConfig(**_SIZES, new_decoder_architecture=True, num_kv_heads=2, **_SPECIAL),
    # GPT-2 goes round the attention interface with this setting, under eager attention alone.
    "gpt2_upcast": lambda: GPT2Config(**_GPT, reorder_and_upcast_attn=True, attn_implementation="eager", **_SPECIAL),
    "gpt_neo": lambda: GPTNeoConfig(**_NEO, **_SPECIAL),
    "gpt_neox_japanese": lambda: GPTNeoXJapaneseConfig(**_SIZES, intermediate_multiple_size=2, **_SPECIAL),
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
    """A model whose attention is far from uniform."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = (AutoModelForCausalLM if language_model else AutoModel).from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # (RoFormer's angles are no weights.)
            if (parameter.dim() >= 2 or key.endswith("bias")) and "embed_positions" not in key:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def _sees_the_future(name):
    model, ids = build_adapted(name), torch.arange(3, 11)[None]
    other = ids.clone()
    other[0, -1] = 3
    with torch.no_grad():
        return not torch.equal(model(ids)[0][0, 0], model(other)[0][0, 0])


# transformers 5.17 gives the decoders of Megatron-BERT, RemBERT and RoFormer a bidirectional mask: no decoders to generate with.
for _name in ("megatron_bert_causal", "rembert_causal", "roformer_causal"):
    if _sees_the_future(_name):
        del CONFIGS[_name]

ADAPTED = sorted(CONFIGS)
_BIDIRECTIONAL = ("deberta", "deberta_v2", "megatron_bert", "mpnet", "roformer", "xlnet")
CAUSAL = [name for name in ADAPTED if name not in (*_BIDIRECTIONAL, "xlnet_causal")]
CACHED = [name for name in CAUSAL if name != "openai"]  # OpenAI-GPT has no cache
# Those that have no alibi and no windows, and Bloom, run on static caches in transformers.
STATIC = ["bloom", "codegen", "falcon", "falcon_grouped", "gpt2_upcast", "gptj"]
# A causal XLNet cannot be run with padding, in transformers itself.
PADDED = [name for name in ADAPTED if name != "xlnet_causal"]


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
    if name == "gpt_neox_japanese":
        return module.query_key_value(states).view(B, S, HEADS, 3, HEAD_SIZE)[:, :, :, 2]
    if name.startswith(("megatron_bert", "rembert", "roformer")):
        return module.value(states).view(B, S, HEADS, HEAD_SIZE)
    if name == "mpnet":
        return module.v(states).view(B, S, HEADS, HEAD_SIZE)
    if name in ("gpt2_upcast", "openai"):
        return module.c_attn(states)[..., 2 * WIDTH :].view(B, S, HEADS, HEAD_SIZE)
    if name == "xglm":
        return module.v_proj(states).view(B, S, HEADS, HEAD_SIZE)
    return torch.einsum("bsw,whd->bshd", states, module.v)  # XLNet


def output_from(name, module, states, residual, mixed):
    """What an attention module returns for the mixed output of its heads, [B, T, H, D], in evaluation mode."""
    if name.startswith(("deberta", "megatron_bert", "rembert", "roformer")):
        return mixed.flatten(2)
    if name.startswith("xlnet"):
        return module.layer_norm(torch.einsum("bthd,whd->btw", mixed, module.o) + states)
    [projection] = [getattr(module, name) for name in ("dense", "out_proj", "c_proj", "o") if hasattr(module, name)]
    return projection(mixed.flatten(2)) + (residual if name == "bloom" else 0)
