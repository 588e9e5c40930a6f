"""Deliberately broken RSA, which every check must catch."""

from dataclasses import replace

import torch

from rsa_hf.heads import RSAHeads


def break_geometry(monkeypatch, change):
    """Let every RSA layer see another geometry than the one it was called with."""
    forward = RSAHeads.forward
    monkeypatch.setattr(
        RSAHeads, "forward", lambda self, attention, value, geometry: forward(self, attention, value, change(geometry))
    )


def forgets_the_offset(geometry):
    """Distances counted from the start of the piece, not of the text: the trap of public re-implementations."""
    position = None if geometry.position is None else torch.zeros_like(geometry.position)
    return replace(geometry, query_offset=0, position=position)


def farthest(visible, T, S):
    """In place of `query_position`: what a query sees farthest is taken for its own place."""
    own = torch.where(visible, torch.arange(S), -1).amax(-1) - torch.arange(visible.shape[-2])
    return own.amax().clamp(0, S - T)
