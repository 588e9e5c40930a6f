"""Context managers that break RSA in the ways in which public re-implementations are wrong.

A check that passes with broken RSA proves nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from broken import forgets_the_offset, ignored
from rsa_hf import RSAHeads, patching
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import Learned

Broken = Callable[[], AbstractContextManager[Any]]
_FORWARD, _LEARNED, _LOAD = RSAHeads.forward, RSAHeads.learned.fget, PreTrainedModel.from_pretrained.__func__
_DETACH = patching.detach_heads


def _forward(change: Callable[..., Tensor]) -> Broken:
    return lambda: mock.patch.object(RSAHeads, "forward", change)


def _mask(change: Callable[[AttentionMask], AttentionMask]) -> Broken:
    """RSA sees a changed mask."""
    return _forward(lambda self, attention, value, mask: _FORWARD(self, attention, value, change(mask)))


def _learned(change: Callable[[Learned], Learned]) -> Broken:
    """RSA uses other numbers than its parameters."""
    return lambda: mock.patch.object(RSAHeads, "learned", property(lambda self: change(_LEARNED(self))))


def _detached(learned: Learned) -> Learned:
    return Learned(learned.mu, *(None if rate is None else rate.detach() for rate in learned[1:]))


def _load(cls: type[PreTrainedModel], *args: Any, **keywords: Any) -> PreTrainedModel:
    """Load a model, but with gates and rates at their initial values."""
    model = _LOAD(cls, *args, **keywords)
    for module in model.modules():
        if isinstance(module, RSAHeads):
            for parameter in module.parameters():
                parameter._is_hf_initialized = False
            module.reset_parameters()
    return model


def _detach(model: PreTrainedModel) -> None:
    """Remove all heads except the last module's."""
    last = [module for module in model.modules() if isinstance(module._modules.get("rsa"), RSAHeads)][-1]
    child = last.rsa
    _DETACH(model)
    last.add_module("rsa", child)


BROKEN: dict[str, Broken] = {
    "does nothing": _forward(lambda self, attention, value, mask: attention),
    # f(τ) in place of f(τ + 1)
    "one step late": _forward(
        lambda self, attention, value, mask: _FORWARD(self, attention, value.roll(1, dims=2), mask)
    ),
    "other direction": _mask(lambda mask: replace(mask, causal=not mask.causal, visible=None)),
    "mask ignored": _mask(ignored),
    "offset forgotten": _mask(forgets_the_offset),
    "not quite shut": _learned(lambda learned: learned._replace(mu=learned.mu.clamp(min=-0.3))),
    "rates not trained": _learned(_detached),
    "rates lost": lambda: mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(_load)),
    "one left behind": lambda: mock.patch.object(patching, "detach_heads", _detach),
}
