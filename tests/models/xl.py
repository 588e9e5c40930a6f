"""Tiny Transformer-XL models, and how texts are cut into segments."""

import torch
from transformers import AutoModelForCausalLM

from families import FULL_PLAN
from rsa_hf import RSAConfig, patch_model
from rsa_hf.models.transformer_xl import TransformerXLConfig

VOCAB = 29
TINY = {
    "vocab_size": VOCAB,
    "cutoffs": [],
    "div_val": 1,
    "d_model": 32,
    "n_head": 8,
    "d_head": 4,
    "d_inner": 48,
    "n_layer": 2,
    "mem_len": 40,
    "clamp_len": -1,
    "same_length": False,
    "dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    # Large, so that attention is far from uniform.
    "init_std": 0.2,
    "proj_init_std": 0.2,
}
BANDS = {"cutoffs": [9, 14, 20], "div_val": 2}


def config(**changes):
    return TransformerXLConfig(**{**TINY, **changes})


def build(attention="sdpa", rsa=None, **changes):
    """A language model; `rsa`: settings of RSAConfig beyond the full plan, {} for none."""
    model = AutoModelForCausalLM.from_config(config(**changes), attn_implementation=attention).eval()
    return model if rsa is None else patch_model(model, RSAConfig(**{**FULL_PLAN, **rsa}))


def text(batch=2, length=24):
    return torch.randint(3, VOCAB, (batch, length))


def in_segments(model, tokens, lengths, **inputs):
    """Log-probabilities of a text, segment by segment, each behind the memory of those before."""
    logits, mems = [], None
    for segment in tokens.split(lengths, dim=1):
        out = model(segment, mems=mems, **inputs)
        logits.append(out.logits)
        mems = out.mems
    return torch.cat(logits, dim=1)


def results_of_two_segments(model, expected):
    """What `scripts/transformer_xl_reference.py` had from transformers 4.57, from this model."""
    found, mems = {}, None
    for i, segment in enumerate(expected["tokens"]):
        model.zero_grad()
        out = model(segment, mems=mems, labels=segment)
        out.loss.backward()
        mems = out.mems
        found[f"loss.{i}"], found[f"logits.{i}"] = out.loss.detach(), out.logits.detach()
        found[f"mems.{i}"] = torch.stack(mems)
        found[f"gradient.{i}"] = model.transformer.layers[0].dec_attn.qkv_net.weight.grad.clone()
    return found
