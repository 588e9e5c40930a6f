"""Does a text in pieces, over a cache, give what it gives at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rsa_hf.cli.doctor_model.distances import NOTHING, TOLERANCE, distance, size
from rsa_hf.cli.doctor_model.subject import Subject, gates_at, is_said_to_be_causal, without_heads
from rsa_hf.cli.findings import Finding

__all__ = ["check_cache"]

PIECES = {"token by token": [1] * 5, "in pieces of several tokens": [4, 3]}


@torch.no_grad()
def check_cache(subject: Subject) -> Iterator[Finding]:
    """A text that comes in pieces, over a cache, gives what it gives at once."""
    if not subject.accepts("past_key_values") or not is_said_to_be_causal(subject):
        yield Finding("note", "cache", "no causal decoder: it keeps no cache")
        return
    with without_heads(subject.model):
        plain = subject.streams()[subject.text]
    with gates_at(subject.model, 0.0):
        at_once = subject.streams()[subject.text]
    effect = distance(at_once, plain)
    for name, pieces in PIECES.items():
        try:
            with without_heads(subject.model):
                gap = distance(_in_pieces(subject, pieces), plain) / size(plain)
            problem = f"is off by {gap:.1e}" if not gap <= NOTHING else None
        except Exception as error:
            problem = f"fails ({type(error).__name__}: {str(error).strip():.100})"
        if problem is not None:
            yield Finding("note", "cache", f"{name}, the plain model {problem}: not comparable")
            continue
        with gates_at(subject.model, 0.0):
            off = distance(_in_pieces(subject, pieces), at_once) / effect
        words = f"{name}, outputs are off by {off:.1e} of RSA's effect"
        yield Finding("ok" if off <= TOLERANCE else "FAIL", "cache", words)


def _in_pieces(subject: Subject, pieces: Sequence[int]) -> Tensor:
    ids = subject.inputs[subject.text]
    cache, found = None, []
    for piece in ids.split([ids.shape[1] - sum(pieces), *pieces], dim=1):
        out = subject.run(**{subject.text: piece}, past_key_values=cache, use_cache=True)
        cache = out.get("past_key_values")
        if cache is None:
            raise ValueError("the model gives no cache")
        found.append(out["logits"] if "logits" in out else out["last_hidden_state"])
    return torch.cat(found, dim=1)
