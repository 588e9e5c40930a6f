"""Does what is saved come back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from rsa_hf.cli.doctor_model.distances import same_bits, share_of
from rsa_hf.cli.doctor_model.subject import Subject, rsa_layers, unpatched
from rsa_hf.cli.findings import Finding
from rsa_hf.patching import is_patched

__all__ = ["check_reload"]


@torch.no_grad()
def check_reload(subject: Subject) -> Iterator[Finding]:
    """What `save_pretrained` writes, in a folder of its own, comes back through `from_pretrained` bit for bit."""
    problem = _off_after_reload(subject) if subject.before is None else _moved_off_after_reload(subject)
    if problem is None:
        yield Finding("ok", "reload", "saved and loaded, it gives the same bits")
        return
    with unpatched(subject.model):
        plain = _off_after_reload(subject)
    if plain is not None:
        yield Finding("note", "reload", f"the plain model does not come back the same either: {plain}")
    else:
        yield Finding("FAIL", "reload", problem)


def _moved_off_after_reload(subject: Subject) -> str | None:
    """The same with gates and rates off their starts: what is loaded must come from the file."""
    parameters = [parameter for _, heads in rsa_layers(subject.model) for parameter in heads.parameters()]
    starts = [parameter.clone() for parameter in parameters]
    try:
        for i, parameter in enumerate(parameters):
            parameter.add_(0.01 * (1 + i % 7))
        return _off_after_reload(subject)
    finally:
        for parameter, start in zip(parameters, starts, strict=True):
            parameter.copy_(start)


def _off_after_reload(subject: Subject) -> str | None:
    model = subject.model
    with tempfile.TemporaryDirectory(prefix="rsa-hf-doctor-") as folder:
        model.save_pretrained(folder)
        try:
            loaded = type(model).from_pretrained(
                folder,
                dtype=model.dtype,
                attn_implementation=getattr(model.config, "_attn_implementation", None),
            )
        except Exception as error:
            return f"what was saved does not load: {type(error).__name__}: {str(error).strip():.300}"
    if is_patched(loaded) is not is_patched(model):
        return "what was saved has lost its RSA heads"
    if getattr(loaded.config, "rsa", None) != getattr(model.config, "rsa", None):
        return "what was saved has another plan"
    saved, found = model.state_dict(), loaded.state_dict()
    changed = [name for name in saved if ".rsa." in name and not torch.equal(saved[name].cpu(), found[name].cpu())]
    if changed:
        return f"other gates and rates were loaded than were saved: {', '.join(changed[:3])}"
    expected = subject.streams()
    moved: Any = loaded
    after = subject.streams(moved.to(model.device).eval())
    return None if same_bits(after, expected) else f"outputs after loading are off by {share_of(after, expected):.1e}"
