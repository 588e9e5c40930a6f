"""Tiny random models of the families that the fast tests run on. A new family is one line."""

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rsa_hf import patch_model

VOCAB, PAD, WINDOW = 97, 0, 5
# Configs map these names to their own.
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 48,
    "max_position_embeddings": 128, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HALF = {"layers": 2, "attention_heads": 8, "ffn_dim": 48}
_BART = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in _HALF.items()}
_WINDOWS = {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": WINDOW}
_ALTERNATING = ["sliding_attention", "full_attention"]


def tiny_config(model_type, **changes):
    """The tiny config of any type of transformers."""
    sizes = {key: value for key, value in _SIZES.items() if (model_type, key) != ("xlnet", "max_position_embeddings")}
    return AutoConfig.for_model(model_type, **{**sizes, **changes})


CONFIGS = {
    "bert": lambda: tiny_config("bert"),
    "roberta": lambda: tiny_config("roberta"),
    "gpt2": lambda: tiny_config("gpt2"),
    "llama": lambda: tiny_config("llama", num_key_value_heads=2),
    "t5": lambda: tiny_config("t5", d_kv=4, d_ff=48, num_layers=2, decoder_start_token_id=PAD),
}
FAMILIES = sorted(CONFIGS)
DECODERS = ["gpt2", "llama"]  # learned positions; rotary positions and grouped values

# Only for the tests of generation and flash attention: a window in every layer, or in every other one (so that the
# cache is a hybrid), windows to both sides, and cross-attention under flash attention.
MORE_CONFIGS = {
    "mistral": lambda: tiny_config("mistral", **_WINDOWS),
    "gemma3": lambda: tiny_config("gemma3_text", **_WINDOWS, layer_types=_ALTERNATING),
    "modernbert": lambda: tiny_config("modernbert", local_attention=2 * WINDOW, layer_types=_ALTERNATING),
    "bart": lambda: tiny_config("bart", **_BART, decoder_start_token_id=2, forced_eos_token_id=None),
}
WINDOWED = ["mistral", "gemma3"]
ENCODER_DECODERS = ["t5", "bart"]
ENCODERS = ["bert", "roberta"]
ATTENTIONS = ["sdpa", "eager"]

# Every kind of head, with and without dilation, a dilation per head, and two plain heads.
FULL_PLAN = {
    "num_regular": 1,
    "num_cyclical_pairs": 1,
    "num_dilated_regular": 1,
    "num_dilated_cyclical_pairs": 1,
    "dilation": [2, 3, 5],
    "gate_init": 0.5,
}


def build(family: str, attention: str = "sdpa"):
    """Build a base model with large weights, so that attention is far from uniform."""
    model = AutoModel.from_config({**CONFIGS, **MORE_CONFIGS}[family](), attn_implementation=attention)
    return widen(model)


def build_language_model(family: str, attention: str = "sdpa"):
    auto = AutoModelForSeq2SeqLM if family in ENCODER_DECODERS else AutoModelForCausalLM
    return widen(auto.from_config({**CONFIGS, **MORE_CONFIGS}[family](), attn_implementation=attention))


def widen(model):
    """Draw larger weights than usual for all matrices."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def move_rates(model):
    """Move gates and rates away from their initial values, as training does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".rsa." in name:
                parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model.eval()


def patched(family, attention="sdpa", seed=0, plan=FULL_PLAN, make=build_language_model):
    """Build a language model with RSA heads, with the same weights on every call."""
    torch.manual_seed(seed)
    return move_rates(patch_model(make(family, attention), plan))


def tokens(rows=2, length=11):
    """Draw tokens, none of them special."""
    return torch.randint(3, VOCAB, (rows, length))


@torch.no_grad()
def effect_of_later_tokens(model, **keywords):
    """How much the last tokens of a text change the outputs at the first ones."""
    ids = tokens(2, 10)
    other = ids.clone()
    other[:, 8:] = 5
    before, after = (model(x, **keywords)[0][:, :6] for x in (ids, other))
    return float((before - after).abs().max())


def inputs(family: str, batch: int = 2, length: int = 11, padding: int | None = None) -> dict[str, torch.Tensor]:
    """Draw tokens, none of them special. The decoder of an encoder-decoder gets another length.

    With `padding` there is a mask, and the first row begins with so many tokens of padding.
    """
    drawn = {"decoder_input_ids": tokens(batch, length - 4)} if family == "t5" else {}
    drawn["input_ids"] = tokens(batch, length)
    if padding is not None:
        drawn["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        drawn["attention_mask"][0, :padding] = drawn["input_ids"][0, :padding] = PAD
    return drawn
