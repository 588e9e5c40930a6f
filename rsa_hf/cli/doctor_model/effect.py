"""Does RSA do anything: without that, the other checks would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rsa_hf.cli.doctor_model.distances import share_of
from rsa_hf.cli.doctor_model.subject import Subject, gates_at, without_heads
from rsa_hf.cli.findings import Finding

__all__ = ["check_effect"]

LEAST_EFFECT = 1e-3  # of the outputs' size: what half-open gates change at the least


@torch.no_grad()
def check_effect(subject: Subject) -> Iterator[Finding]:
    """The RSA heads take part: half-open gates change the outputs."""
    with without_heads(subject.model):
        plain = subject.streams()
    with gates_at(subject.model, 0.0):
        found = subject.streams()
    share = share_of(found, plain)
    works = all(bool(stream.isfinite().all()) for stream in found.values()) and share >= LEAST_EFFECT
    yield Finding("ok" if works else "FAIL", "effect", f"half-open gates change the outputs by {share:.1%}")
