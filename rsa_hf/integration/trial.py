"""Trial runs on marked values: what a model's attention modules do, and what an attention function does with V.

In the even channels of V only the last key is marked, in the odd ones every key but the first: a query whose output is
not zero there sees one of them. So a trial run shows the direction of a layer, whatever its class or config say.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OWN = ("transformers.", "rsa_hf.")  # packages whose attention functions need no trial
_SDPA = torch._C._nn.scaled_dot_product_attention
# Functions that passed a trial, for as long as they exist, and whether it showed that no query sees later keys.
_trusted: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, as `record_attention_calls` sees it."""

    module: nn.Module
    layer_shape: tuple[int, int, int]  # heads, value heads and head size, on all processes together
    query_length: int
    key_length: int
    stated: bool | None  # whether it is causal, according to the call or the module; None: neither says
    causal: bool | None  # whether it is causal, according to marked values; on the meta device as stated


class _State(threading.local):
    """A thread's trial run, and whether RSA heads ran in it. Other threads may run models of their own."""

    calls: list[AttentionCall] | None = None  # the recorded ones; None outside of `record_attention_calls`
    marking: bool = False
    heads_ran: bool = False  # since `_require_heads_ran` looked last


state = _State()


@contextmanager
def record_attention_calls() -> Iterator[list[AttentionCall]]:
    """Record the calls of attention in this thread while the context is open, with or without RSA heads.

    Each is first made on marked values, which show its direction. There must be no cached keys.
    """
    state.calls = []
    try:
        yield state.calls
    finally:
        state.calls = None


@contextmanager
def marking() -> Iterator[None]:
    """Replace V by `marks_of` in modules that do not use the attention interface while the context is open."""
    state.marking = True
    try:
        yield
    finally:
        state.marking = False


def marks_of(value: Tensor, dim: int = 2) -> Tensor:
    """V with a 1 in the even channels of the last key, along `dim`, in the odd ones of all but the first, else 0."""
    marks = torch.zeros_like(value)
    marks.select(dim, -1)[..., ::2] = 1
    marks.narrow(dim, 1, value.shape[dim] - 1)[..., 1::2] = 1
    return marks


def marked(value: Tensor, dim: int = 2) -> Tensor:
    """V, or its marks if `marking` is open."""
    return marks_of(value, dim) if state.marking else value


def sees_last(output: Tensor) -> Tensor:
    """Which queries see the last key, [B, T], from attention's output on `marks_of`, [B, T, H, D]."""
    return (output[..., ::2] != 0).flatten(2).any(-1)


def direction_shown(output: Tensor, stated: bool | None) -> bool | None:
    """Whether a layer is causal, from attention's output on `marks_of`, [B, T, H, D].

    What the layer has `stated` holds for a single token, if the last key is padding in all rows, or if only some
    queries see later keys: those of an image or of a chunk, or padding, whose queries may see all keys.
    """
    last = sees_last(output)
    ahead = last[last[:, -1], :-1]
    if not ahead.numel():
        return stated
    shown = not bool(ahead.any() | (output[:, 0, :, 1::2] != 0).any())
    return shown if stated is None or shown or bool(ahead.all()) else stated


def is_aligned_top_left(attend: Callable[[Tensor, Tensor], Any], query: Tensor, value: Tensor) -> bool:
    """Whether a causal function without a mask puts T < S queries at the first positions, not at the last."""
    with torch.no_grad():
        return not bool(sees_last(attend(torch.zeros_like(query), marks_of(value))[0]).any())


def require_trusted(
    attend: Callable[[Tensor, Tensor], Any],
    foreign: Any,
    implementation: str,
    query: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    fills_cache: bool,
) -> None:
    """Try an attention function that is not transformers' own on marked values, once, before its output is used.

    A function of another library may split the sequence or the heads, or lay out its output differently. `attend`
    calls it on Q, [B, H, T, D], and V, [B, Hv, S, D]; `foreign` is from `foreign_part`; `is_causal`: there are later
    keys that a query must not see. Raises a NotImplementedError if it cannot be tried here, and a ValueError if its
    output is not that of attention over the V that it was given.
    """
    shown = _trusted.get(foreign)
    if shown or (shown is False and not is_causal):
        return
    name = f"attn_implementation={implementation!r} ({foreign.__module__}.{getattr(foreign, '__qualname__', '')})"
    if str(foreign.__module__).startswith("torch.distributed"):
        problem = "context parallelism cuts the sequence. Use FSDP2 or tensor parallelism (tp_plan)"
    elif torch.compiler.is_compiling():
        problem = "it is tried before its output is trusted, so run the model once before it is compiled"
    else:
        problem = "it fills a paged cache" if fills_cache else ""
    if problem:
        raise NotImplementedError(f"RSA does not work with {name}, which is not transformers' own: {problem}.")
    devices = [value.device] if value.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        # Zero queries weight all keys that they see equally, so the same V at all keys comes out unchanged.
        same = value[:, :, :1]
        spread = torch.arange(same.numel(), device=value.device) * 0.618034 % 1  # no two neighbours are alike
        same = (1 + spread).to(value.dtype).view(same.shape)
        result = attend(torch.zeros_like(query), same.expand_as(value).contiguous())
        # The output of a query that sees no key may be NaN.
        output = attention_output(result, implementation, query, value).to(value.dtype).nan_to_num()
        expected = same.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)
        share = (output * expected).sum(-1, keepdim=True) / expected.square().sum(-1, keepdim=True)
        is_laid_out = torch.allclose(output, share * expected, rtol=0.02, atol=0.02)
        crosses = is_causal and bool(sees_last(attend(torch.zeros_like(query), marks_of(value))[0])[:, :-1].any())
    if not is_laid_out or crosses:
        what = "sees keys after a query" if is_laid_out else "mixes up batch, positions, heads or channels"
        raise ValueError(
            f"{name} does not compute attention over the V that it is given: its output {what}. RSA needs [batch, "
            "queries, heads, head size], for all heads and all positions. Use 'sdpa', 'eager' or 'flash_attention_2'."
        )
    if query.shape[2] > 1:  # one query shows nothing about the direction
        _trusted[foreign] = is_causal


def attention_output(result: Any, implementation: str, query: Tensor, value: Tensor) -> Tensor:
    """The output of an attention function, [B, T, H, D]; a ValueError if it returned anything else."""
    B, H, T, _ = query.shape
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)
    if is_pair and result[0].shape == (B, T, H, value.shape[3]):
        output: Tensor = result[0]
        return output
    returned = f"{tuple(result[0].shape)}" if is_pair else f"a {type(result).__name__}"
    returned += f" of {len(result)}" if isinstance(result, tuple) and not is_pair else ""
    raise ValueError(
        f"attn_implementation={implementation!r} returned {returned}: RSA needs (output, weights) with an output of "
        f"shape [batch, queries, heads, head size], here {(B, T, H, value.shape[3])}. A library that splits the "
        "sequence or the heads over processes (DeepSpeed's Ulysses) does not work with RSA."
    )


def foreign_part(base: Any) -> Any:
    """The part of an attention function that is not transformers' own: itself, a replaced sdpa, or None."""
    while isinstance(base, functools.partial):
        base = base.func
    base = getattr(base, "_torchdynamo_orig_callable", base)  # what torch.compiler.disable wraps
    # Not `__module__`, which functools.wraps copies.
    if not getattr(base, "__globals__", {}).get("__name__", "").startswith(OWN):
        return base
    return None if F.scaled_dot_product_attention is _SDPA else F.scaled_dot_product_attention
