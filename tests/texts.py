"""Padded batches, masks, and forward passes in chunks that share a cache."""

import torch
from transformers import DynamicCache, StaticCache

from families import PAD, VOCAB

LENGTH = 14
# Lengths of the chunks.
PIECES = {"cached": [8, 1, 1, 1, 1, 1, 1], "chunked prefill": [3, 5, 4, 2], "token by token": [1] * LENGTH}
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=20),
}


def padded(ids, counts, side="left"):
    """A batch whose row i has `counts[i]` tokens of padding on one side."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(counts):
        mask[row, :count] = 0
    mask = mask if side == "left" else mask.flip(1)
    return {"input_ids": torch.where(mask.bool(), ids, PAD), "attention_mask": mask, "position_ids": positions(mask)}


def positions(mask):
    """The position of each token among the real ones of its row."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def padded_batch():
    """Three rows of tokens, two of them with padding on the left."""
    return padded(torch.randint(3, VOCAB, (3, LENGTH)), (4, 1))


def visible_with_blocks(text, before, behind, left, right):
    """Which keys each query sees, [B, 1, T, S], in a causal model with blocks that see all of themselves.

    Such blocks are the tokens of an image, or a prefix.

    Args:
        text: a character per token: "." for a causal one, or the name of its block.
        before: cached tokens before the text.
        behind: empty slots of a static cache behind the text.
        left: tokens of left padding of each row.
        right: tokens of right padding of each row.
    """
    T, S = len(text), before + len(text) + behind
    visible = torch.zeros(len(left), 1, T, S, dtype=torch.bool)
    for b in range(len(left)):
        real = range(left[b], before + T - right[b])
        for t in range(T):
            for s in real:
                together = text[t] != "." and s >= before and text[t] == text[s - before : s - before + 1]
                visible[b, 0, t, s] = s <= before + t or (together and before + t in real)
    return visible


def uncached(model, batch):
    return model(**batch, use_cache=False).logits


def in_pieces(model, batch, pieces, cache):
    """Logits of a text that is read in chunks over one cache."""
    logits, stop = [], 0
    for length in pieces:
        start, stop = stop, stop + length
        piece = {name: rows[:, start:stop] for name, rows in batch.items() if name != "attention_mask"}
        mask = batch["attention_mask"][:, :stop]
        logits.append(model(**piece, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(logits, 1)


def difference(model, batch, pieces, cache):
    """The largest difference between the logits of a text in chunks and of the whole text, without padding."""
    real = batch["attention_mask"].bool()
    return float((in_pieces(model, batch, pieces, cache)[real] - uncached(model, batch)[real]).abs().max())
