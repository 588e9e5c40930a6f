"""Does RSA leave the model as it was: with its gates shut, and taken off again."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rsa_hf.cli.doctor_model.distances import same_bits, share_of
from rsa_hf.cli.doctor_model.subject import Streams, Subject, gates_at, unpatched, without_heads
from rsa_hf.cli.findings import Finding
from rsa_hf.patching import is_patched

__all__ = ["check_identity"]


@torch.no_grad()
def check_identity(subject: Subject) -> Iterator[Finding]:
    """Shut gates give the bits of the unpatched model, and so does `unpatch_model`."""
    with without_heads(subject.model):
        plain = subject.streams()
        again = subject.streams()
    if not same_bits(again, plain):
        yield Finding("note", "identity", "the plain model gives other outputs when it is run again: not comparable")
        return
    with gates_at(subject.model, -math.inf):
        shut = subject.streams()
    same = same_bits(shut, plain)
    words = "shut gates change no bit" if same else f"shut gates change the outputs by {share_of(shut, plain):.1e}"
    yield Finding("ok" if same else "FAIL", "identity", words)
    problem = _after_unpatching(subject, plain)
    yield Finding("FAIL" if problem else "ok", "unpatching", problem or "gives the plain model, bit for bit")


def _after_unpatching(subject: Subject, plain: Streams) -> str | None:
    model = subject.model
    if subject.before is not None:
        names, config = subject.before
    else:
        names = [name for name in model.state_dict() if ".rsa." not in name]
        config = {key: value for key, value in model.config.to_dict().items() if key != "rsa"}
    with unpatched(model):
        if is_patched(model):
            return "leaves RSA heads behind"
        if list(model.state_dict()) != names:
            return "leaves other tensors than there were"
        if model.config.to_dict() != config:
            return "leaves another config than there was"
        found = subject.streams()
    return None if same_bits(found, plain) else f"leaves outputs that are off by {share_of(found, plain):.1e}"
