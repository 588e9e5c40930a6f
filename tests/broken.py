"""Deliberately broken RSA, which each check must catch."""

from dataclasses import replace

import torch

from rsa_hf.layer import RSAHeads


def break_mask(monkeypatch, change):
    """Change the mask that every RSA layer is called with."""
    forward = RSAHeads.forward
    monkeypatch.setattr(
        RSAHeads, "forward", lambda self, attention, value, mask: forward(self, attention, value, change(mask))
    )


def ignored(mask):
    """Forget padding, documents and everything else that a mask hides."""
    return replace(mask, key_mask=None, documents=None, visible=None)


def without_window(mask):
    return replace(mask, sliding_window=None)


def forgets_the_offset(mask):
    """Count distances from the start of the chunk, not of the text: a known error of public re-implementations."""
    position = None if mask.query_position is None else torch.zeros_like(mask.query_position)
    return replace(mask, query_offset=0, query_position=position)


def farthest(visible, T, S, *_):
    """Replace `query_position`: take the farthest key that a query sees for its own position."""
    own = torch.where(visible, torch.arange(S), -1).amax(-1) - torch.arange(visible.shape[-2])
    return own.amax().clamp(0, S - T)
