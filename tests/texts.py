"""Padded texts, and runs over them in pieces that share a cache."""

import torch
from transformers import DynamicCache, StaticCache

from families import PAD

CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=20),
}


def padded(ids, counts, side="left"):
    """A batch whose first rows begin, or end, with so much padding."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(counts):
        mask[row, :count] = 0
    mask = mask if side == "left" else mask.flip(1)
    return {
        "input_ids": torch.where(mask.bool(), ids, PAD),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


def in_pieces(model, batch, pieces, cache):
    """The logits of a text that is read piece by piece over one cache: chunked prefill, then single tokens."""
    logits, stop = [], 0
    for length in pieces:
        start, stop = stop, stop + length
        piece = {name: batch[name][:, start:stop] for name in ("input_ids", "position_ids")}
        mask = batch["attention_mask"][:, :stop]
        logits.append(model(**piece, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(logits, 1)
