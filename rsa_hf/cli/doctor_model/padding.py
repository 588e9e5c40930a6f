"""Does a padded row, in a batch, give what it gives alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rsa_hf.cli.doctor_model.distances import NOTHING, TOLERANCE, distance, share_of
from rsa_hf.cli.doctor_model.subject import (
    Streams,
    Subject,
    gates_at,
    is_said_to_be_causal,
    rsa_layers,
    without_heads,
)
from rsa_hf.cli.findings import Finding

__all__ = ["check_padding"]

PADDING = 3  # tokens


@torch.no_grad()
def check_padding(subject: Subject) -> Iterator[Finding]:
    """A padded row, in a batch, gives what it gives alone."""
    if not subject.accepts("attention_mask"):
        yield Finding("note", "padding", "it takes no attention_mask")
        return
    # Padding behind a text shows nothing where no token sees it; before it, it moves positions that only count slots.
    sees_later = "decoder_input_ids" in subject.inputs or not is_said_to_be_causal(subject)
    for side in ("left", "right") if sees_later else ("left",):
        with without_heads(subject.model):
            plain, padded = _alone_and_padded(subject, side)
        gap = share_of(padded, plain)
        if gap <= NOTHING:
            break
    else:
        yield Finding("note", "padding", f"padding changes the plain model by {gap:.1e} too: not comparable")
        return
    with gates_at(subject.model, 0.0):
        alone, padded = _alone_and_padded(subject, side)
    off = max(distance(padded[name], alone[name]) / distance(alone[name], plain[name]) for name in _reached(subject))
    words = f"{side}-padded rows are off by {off:.1e} of RSA's effect"
    yield Finding("ok" if off <= TOLERANCE else "FAIL", "padding", words)


def _alone_and_padded(subject: Subject, side: str) -> tuple[Streams, Streams]:
    """The first text alone, and padded beside a longer one; real tokens only."""
    first, second = subject.inputs["input_ids"].split(1)
    others = {name: ids[:1] for name, ids in subject.inputs.items() if name != "input_ids"}
    pad = getattr(subject.model.config.get_text_config(), "pad_token_id", None) or 0
    parts = [first, torch.full_like(first[:, :PADDING], pad)]
    longer = torch.cat([second[:, :PADDING], second], dim=1)
    batch = torch.cat([torch.cat(parts if side == "right" else parts[::-1], dim=1), longer])
    real = slice(PADDING, None) if side == "left" else slice(first.shape[1])
    mask = torch.zeros_like(batch)
    mask[0, real], mask[1] = 1, 1
    alone = subject.streams(None, **_placed(subject, first, torch.ones_like(first)), **others)
    both = {name: ids.expand(2, -1) for name, ids in others.items()}
    padded = subject.streams(None, **_placed(subject, batch, mask), **both)
    return alone, {name: stream[:1, real] if name == "input_ids" else stream[:1] for name, stream in padded.items()}


def _placed(subject: Subject, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Inputs with the position of each token, where a model takes that."""
    inputs = {"input_ids": ids, "attention_mask": mask}
    if subject.accepts("position_ids"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


def _reached(subject: Subject) -> list[str]:
    """The streams that RSA heads change: the encoder of an encoder-decoder need not have any."""
    network: Any = subject.model
    if subject.text == "input_ids":
        return ["input_ids"]
    return [subject.text, *(["input_ids"] if rsa_layers(network.get_encoder()) else [])]
