"""Tiny Block-Recurrent Transformers, and how texts are cut into segments."""

import torch
from transformers import AutoModelForCausalLM

from families import FULL_PLAN
from rsa_hf import RSAConfig, patch_model
from rsa_hf.models.block_recurrent import BlockRecurrentConfig

VOCAB, WINDOW = 29, 5
TINY = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "n_head": 8,
    "d_head": 4,
    "d_inner": 48,
    "n_layer": 3,
    "window_size": WINDOW,
    "recurrent_layers": [-2],
    "num_state_vectors": 3,
    # So small that classes of several distances lie within two windows.
    "relative_attention_num_buckets": 4,
    "relative_attention_max_distance": 6,
    "dropout": 0.0,
    "dropatt": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def config(**changes):
    return BlockRecurrentConfig(**{**TINY, **changes})


def build(attention="sdpa", rsa=None, **changes):
    """A language model; `rsa`: settings of RSAConfig beyond the full plan, {} for none."""
    model = AutoModelForCausalLM.from_config(config(**changes), attn_implementation=attention).eval()
    return model if rsa is None else patch_model(model, RSAConfig(**{**FULL_PLAN, **rsa}))


def text(batch=2, length=24):
    return torch.randint(3, VOCAB, (batch, length))


def in_segments(model, tokens, lengths):
    """Logits of a text, segment by segment, each behind the memory of those before."""
    logits, mems = [], None
    for segment in tokens.split(lengths, dim=1):
        out = model(segment, mems=mems)
        logits.append(out.logits)
        mems = out.mems
    return torch.cat(logits, dim=1)
