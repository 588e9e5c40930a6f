"""Deliberately broken RSA: what a public re-implementation has got wrong, each as a context in which RSA is so broken.

A check that such a context passes proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from rsa_hf import RSAHeads, patching
from rsa_hf.ops.mask import AttentionMask

__all__ = ["BROKEN"]


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _mask(change: Callable[[AttentionMask], AttentionMask]) -> Callable[[], AbstractContextManager[None]]:
    """RSA sees another mask than the one it was called with."""

    def wrap(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, attention, value, mask: forward(self, attention, value, change(mask))

    return lambda: _replaced(RSAHeads, "forward", wrap)


def _rates(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[], AbstractContextManager[None]]:
    return lambda: _replaced(RSAHeads, "rates", lambda rates: lambda self, *dtype: change(rates(self, *dtype)))


def _does_nothing() -> AbstractContextManager[None]:
    return _replaced(RSAHeads, "forward", lambda _: lambda self, attention, value, mask: attention)


def _one_step_late() -> AbstractContextManager[None]:
    """f(τ) where f(τ + 1) belongs."""

    def wrap(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, attention, value, mask: forward(self, attention, value.roll(1, dims=2), mask)

    return _replaced(RSAHeads, "forward", wrap)


def _other_direction(mask: AttentionMask) -> AttentionMask:
    return replace(mask, causal=not mask.causal, visible=None)


def _mask_ignored(mask: AttentionMask) -> AttentionMask:
    return replace(mask, key_mask=None, segments=None, visible=None)


def _offset_forgotten(mask: AttentionMask) -> AttentionMask:
    position = None if mask.query_position is None else torch.zeros_like(mask.query_position)
    return replace(mask, query_offset=0, query_position=position)


def _rates_lost() -> AbstractContextManager[None]:
    """Loading leaves gates and rates where they start."""

    def wrap(from_pretrained: Any) -> Any:
        def load(cls: type[PreTrainedModel], *args: Any, **keywords: Any) -> PreTrainedModel:
            model = from_pretrained.__func__(cls, *args, **keywords)
            for module in model.modules():
                if isinstance(module, RSAHeads):
                    for parameter in module.parameters():
                        parameter._is_hf_initialized = False
                    module.reset_parameters()
            return model

        return classmethod(load)

    return _replaced_classmethod(PreTrainedModel, "from_pretrained", wrap)


@contextmanager
def _replaced_classmethod(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _one_left_behind() -> AbstractContextManager[None]:
    """Taking the heads off forgets the last module."""

    def wrap(detach: Callable[..., None]) -> Callable[..., None]:
        def forgetful(model: PreTrainedModel) -> None:
            last = [module for module in model.modules() if isinstance(module._modules.get("rsa"), RSAHeads)][-1]
            child = last.rsa
            detach(model)
            last.add_module("rsa", child)

        return forgetful

    return _replaced(patching, "detach_heads", wrap)


BROKEN: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "does nothing": _does_nothing,
    "one step late": _one_step_late,
    "other direction": _mask(_other_direction),
    "mask ignored": _mask(_mask_ignored),
    "offset forgotten": _mask(_offset_forgotten),
    "not quite shut": _rates(lambda rates: {**rates, "gate": rates["gate"].clamp(min=1e-3)}),
    "rates not trained": _rates(lambda rates: {**rates, **{k: v.detach() for k, v in rates.items() if k != "gate"}}),
    "rates lost": _rates_lost,
    "one left behind": _one_left_behind,
}
