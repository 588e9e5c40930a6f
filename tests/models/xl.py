"""Tiny Transformer-XL models."""

from functools import partial

import torch

from models import tiny
from models.tiny import VOCAB, in_segments, text

__all__ = ["BANDS", "VOCAB", "build", "config", "in_segments", "results_of_two_segments", "text"]

BANDS = {"cutoffs": [9, 14, 20], "div_val": 2}
build = partial(tiny.build, "transfo-xl")
config = partial(tiny.config, "transfo-xl")


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
