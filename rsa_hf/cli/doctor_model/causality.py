"""Does a token see later ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rsa_hf.cli.doctor_model.distances import NOTHING, size
from rsa_hf.cli.doctor_model.subject import Subject, gates_at, is_said_to_be_causal, without_heads
from rsa_hf.cli.findings import Finding

__all__ = ["check_causality"]

LATER = 4  # tokens that are changed


@torch.no_grad()
def check_causality(subject: Subject) -> Iterator[Finding]:
    """Where attention is causal, later tokens leave earlier outputs as they are."""
    causal = is_said_to_be_causal(subject)
    with without_heads(subject.model):
        plain = _backwards(subject)
    if plain > NOTHING:
        words = f"later tokens change earlier outputs by {plain:.1e} without RSA too"
        if causal:
            yield Finding("FAIL", "causality", f"{words}, though its attention says that it is causal")
        else:
            yield Finding("note", "causality", "not causal: its tokens see later ones, and so do its RSA heads")
        return
    with gates_at(subject.model, 0.0):
        found = _backwards(subject)
    if found <= NOTHING:
        yield Finding("ok", "causality", "later tokens leave earlier outputs as they are")
    else:
        yield Finding("FAIL", "causality", f"later tokens change earlier outputs by {found:.1e} through the RSA heads")


def _backwards(subject: Subject) -> float:
    """How much other last tokens change the outputs before them, as a share of what they change of their own."""
    ids = subject.inputs[subject.text]
    changed = torch.cat([ids[:, :-LATER], ids[:, -LATER:].flip(0, 1)], dim=1)
    change = subject.streams(None, **{subject.text: changed})[subject.text] - subject.streams()[subject.text]
    return size(change[:, :-LATER]) / size(change[:, -LATER:])
