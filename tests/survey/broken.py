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

from broken import forgets_the_offset
from rsa_hf import RSAHeads, patching
from rsa_hf.ops.mask import AttentionMask

Broken = Callable[[], AbstractContextManager[Any]]
_FORWARD, _RATES, _LOAD = RSAHeads.forward, RSAHeads.rates, PreTrainedModel.from_pretrained.__func__
_DETACH = patching.detach_heads


def _forward(change: Callable[..., Tensor]) -> Broken:
    return lambda: mock.patch.object(RSAHeads, "forward", change)


def _mask(change: Callable[[AttentionMask], AttentionMask]) -> Broken:
    """RSA sees a changed mask."""
    return _forward(lambda self, attention, value, mask: _FORWARD(self, attention, value, change(mask)))


def _rates(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Broken:
    return lambda: mock.patch.object(RSAHeads, "rates", lambda self, *dtype: change(_RATES(self, *dtype)))


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
    "mask ignored": _mask(lambda mask: replace(mask, key_mask=None, documents=None, visible=None)),
    "offset forgotten": _mask(forgets_the_offset),
    "not quite shut": _rates(lambda rates: {**rates, "gate": rates["gate"].clamp(min=1e-3)}),
    "rates not trained": _rates(lambda rates: {**rates, **{k: v.detach() for k, v in rates.items() if k != "gate"}}),
    "rates lost": lambda: mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(_load)),
    "one left behind": lambda: mock.patch.object(patching, "detach_heads", _detach),
}
