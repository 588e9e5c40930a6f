"""The paper's equation 4 on a whole model, written out with T×S matrices and without the package's code.

Which keys a query sees is not read from masks. The model's own attention function is called with zero queries and unit
vectors as values, so that its output is the (uniform) attention matrix. P is masked like softmax attention, whatever
the conventions on masks and direction are. Models beside the attention interface have no such function; for them the
mask that their adapter passes on is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from references import equation_4, visible_keys
from rsa_hf.integration import attention as hooks
from rsa_hf.integration import trial


@contextmanager
def reference_attention(seen_padding: tuple[int, int] = (0, 0)) -> Iterator[dict[nn.Module, int]]:
    """Compute eq. 4 by the reference in every self-attention that has an `rsa` child.

    Args:
        seen_padding: (n, S) breaks it: P sees the first n keys of the first row if there are S keys.

    Yields:
        The modules called with as many queries as keys, with their number of heads; filled while the model runs.
    """
    seen: dict[nn.Module, int] = {}

    def attention(
        base: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kw: Any
    ) -> Any:
        output, weights = base(module, query, key, *args, **kw)
        if query.shape[2] != key.shape[2]:
            return output, weights
        seen[module] = query.shape[1]
        if hasattr(module, "rsa"):
            visible = _visible(base, module, query, key, *args, **kw)
            if key.shape[2] == seen_padding[1]:
                visible[0, :, seen_padding[0] :, : seen_padding[0]] = True
            output = equation_4(module.rsa, output, args[0], visible=visible, causal=False)
        return output, weights

    def mix(module: nn.Module, output: Tensor, value: Tensor, mask: Tensor | None, causal: bool, **kw: Any) -> Tensor:
        T, S = output.shape[1], value.shape[2]
        if T != S:
            return output
        seen[module] = output.shape[2]
        if not hasattr(module, "rsa"):
            return output
        visible = _stated(mask, causal, kw.get("sliding_window"), S)
        visible = visible.expand(len(output), output.shape[2], T, S).clone()
        if seen_padding[1] == S:
            visible[0, :, seen_padding[0] :, : seen_padding[0]] = True
        return equation_4(module.rsa, output, value, visible=visible, causal=False)

    with _replaced(attention, mix):
        yield seen


@contextmanager
def plain_attention() -> Iterator[None]:
    """Use the attention functions of the unpatched model."""
    with _replaced(lambda base, *args, **kw: base(*args, **kw), lambda module, output, *args, **kw: output):
        yield


@contextmanager
def without_attention() -> Iterator[None]:
    """Let every attention return zeros, so that tokens can only reach each other outside attention."""

    def attention(base: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        output, weights = base(*args, **kw)
        return torch.zeros_like(output), weights

    with _replaced(attention, lambda module, output, *args, **kw: torch.zeros_like(output)):
        yield


@contextmanager
def _replaced(attention: Callable[..., Any], mix: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the attention function behind the interface, and the mixing in models beside it."""
    original = AttentionInterface.get_interface.__wrapped__

    def get_interface(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(attention, original(self, name, default))

    interface = mock.patch.object(AttentionInterface, "get_interface", get_interface)
    # `mix` is for modules without an `rsa` child too.
    everywhere = mock.patch.object(hooks, "heads_of", lambda module: module)
    # The heads take part in the forward, as far as its check can see.
    checked = mock.patch.object(type(trial.state), "heads_ran", property(lambda _: True, lambda *_: None))
    with interface, everywhere, checked, mock.patch.object(hooks, "mix_recurrence", mix):
        yield


def _stated(mask: Tensor | None, causal: bool, window: int | None, S: int) -> Tensor:
    """The visibility that a mask, a direction and a window state, [B or 1, H or 1, T or 1, S]."""
    visible = visible_keys(S, S, causal=causal, sliding_window=window)
    if mask is not None:
        shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        visible = visible & (shown if mask.dim() == 4 else shown[:, None, None])[..., :S]
    return visible


@torch.no_grad()
def _visible(
    base: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
) -> Tensor:
    """The visibility that the attention function has, [B, H, T, S], True where a query sees a key."""
    B, heads, S, _ = value.shape
    units = torch.eye(S, dtype=value.dtype).expand(B, heads, S, S)
    weights = base(module, torch.zeros_like(query), key, units, *args, **kw)[0]
    return weights.transpose(1, 2) > 0
