"""Deliberately broken RSA, which every check must catch."""

from dataclasses import replace

import torch

from rsa_hf.heads import RSAHeads


def break_mask(monkeypatch, change):
    """Let every RSA layer see another mask than the one it was called with."""
    forward = RSAHeads.forward
    monkeypatch.setattr(
        RSAHeads, "forward", lambda self, attention, value, mask: forward(self, attention, value, change(mask))
    )


def forgets_the_offset(mask):
    """Distances counted from the start of the piece, not of the text: the trap of public re-implementations."""
    position = None if mask.query_position is None else torch.zeros_like(mask.query_position)
    return replace(mask, query_offset=0, query_position=position)


def farthest(visible, T, S):
    """In place of `query_position`: what a query sees farthest is taken for its own place."""
    own = torch.where(visible, torch.arange(S), -1).amax(-1) - torch.arange(visible.shape[-2])
    return own.amax().clamp(0, S - T)
