"""Attention modules that do not use transformers' attention interface: where their values, output and masks are.

One method of each such class is wrapped, once, when a model with it is built or patched. The wrapper does nothing for
a module that has no `rsa` child; else it runs the method as it is and mixes the recurrence into what attention gives,
before the output projection. So nothing is kept on an instance but its `rsa` child, as for modules that use the
interface, and copies, pickles and wrapped or quantised projections work by themselves.

Three kinds of modules, by where V and the output can be seen:

* a method that computes attention from Q, K and V: GPT-Neo, GPT-J, CodeGen, XLNet (both of its streams);
* a forward that hands K and V to the cache, and the output to a projection: Bloom, Falcon, MPT, the Informer's
  ProbSparse attention, flash attention's versions of GPT-Neo, GPT-J and Falcon;
* a forward that projects V, and returns the output: DeBERTa, DeBERTa-v2.

A new architecture of one of these kinds is a row of `ADAPTERS`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from rsa_hf.geometry import HIDDEN_AT_OR_BELOW, flash_documents, read_geometry, remembered
from rsa_hf.lookup import heads_of
from rsa_hf.versions import what_fits

__all__ = [
    "ADAPTERS",
    "NO_SOFTMAX_ATTENTION",
    "Adapter",
    "adapter_of",
    "connect",
    "has_adapters",
    "mix_recurrence",
    "watch",
]

# By model type. Hybrids that also have layers of softmax attention (Jamba, Bamba, Zamba, …) are patched in those.
NO_SOFTMAX_ATTENTION = {
    "falcon_mamba": "its layers are state-space models",
    "fnet": "its layers mix tokens by Fourier transforms",
    "mamba": "its layers are state-space models",
    "mamba2": "its layers are state-space models",
    "rwkv": "its layers are recurrent, with a weighted average of the past in place of attention",
    "xlstm": "its layers are recurrent",
}

Watcher = Callable[[nn.Module, int, int, int, bool], None]
Run = Callable[[Any, Callable[..., Any], dict[str, Any], Callable[..., Tensor]], Any]


class _Watching(threading.local):
    """Who watches calls of attention; in one thread, since others may run models of their own meanwhile."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []


_watching = _Watching()


@dataclass(frozen=True)
class Adapter:
    """One class of attention modules.

    Attributes:
        module: the module of transformers that defines it, below `transformers.models`.
        name: the class.
        method: its method that is wrapped.
        parameters: of that method, by which Q, K, V, the cache or the mask are known.
        attributes: of the instances, which the wrapper reads or stands in for.
        run: takes the attention module, the method, its arguments by name, and `mix`; runs the method, with what
            `mix` returns in place of the output of attention.
    """

    module: str
    name: str
    method: str
    parameters: tuple[str, ...]
    attributes: tuple[str, ...]
    run: Run = field(repr=False)

    @property
    def path(self) -> str:
        """The full name of the module."""
        return f"transformers.models.{self.module}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Patched modules carry their adapter, so that one that is unpickled in a new process is connected there.
        return _restore, (self.path, self.name)


def mix_recurrence(
    module: nn.Module,
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    sliding_window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Mix the recurrence of a module's RSA heads, if it has any, into the output of attention.

    Args:
        module: the attention module.
        attention: [B, T, H, D].
        value: V, with what a cache or a memory holds, [B, Hv, S, D]; the queries are the last T of S positions.
        mask: None, or a 2-D or 4-D mask as `read_geometry` takes it.
        causal: direction of the call, where the plan does not say.
        sliding_window: number of positions back that a query sees, itself included, where no mask says so.
        documents: the number of each key's document, [B, S], where no mask says so.

    Returns:
        [B, T, H, D].
    """
    for watcher in _watching.watchers:
        watcher(module, attention.shape[2], attention.shape[1], value.shape[2], causal)
    rsa = heads_of(module)
    if rsa is None:
        return attention
    geometry = read_geometry(
        attention.transpose(1, 2),
        value,
        mask,
        causal=causal if rsa.plan.causal is None else rsa.plan.causal,
        aligned_top_left=False,
        sliding_window=sliding_window,
        documents=documents,
    )
    mixed: Tensor = rsa(attention, value, geometry)
    return mixed


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Call `watcher(module, H, T, S, causal)` for each call of attention in a connected module, in this thread."""
    _watching.watchers.append(watcher)
    try:
        yield
    finally:
        _watching.watchers.remove(watcher)


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter of an attention module; None where it needs or has none."""
    for cls in type(module).__mro__:
        adapter = _BY_CLASS.get((cls.__module__, cls.__name__))
        if adapter is not None:
            return adapter
    return None


def connect(model: nn.Module) -> None:
    """Wrap the classes of those attention modules of a model that have an adapter; once in a process.

    Raises:
        RuntimeError: such a module is not as expected; the message names the transformers versions that are.
    """
    for module in model.modules():
        adapter = adapter_of(module)
        if adapter is None:
            continue
        missing = [name for name in adapter.attributes if not hasattr(module, name)]
        if missing:
            raise RuntimeError(_unexpected(adapter, f"to have {', '.join(adapter.attributes)}", missing))
        _connect_class(adapter)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model's own class comes from a module of transformers that adapters are for."""
    return type(model).__module__ in _MODULES


def _restore(path: str, name: str) -> Adapter:
    adapter = _BY_CLASS[path, name]
    _connect_class(adapter)
    return adapter


def _connect_class(adapter: Adapter) -> None:
    cls = getattr(importlib.import_module(adapter.path), adapter.name)
    original = vars(cls).get(adapter.method)
    if hasattr(original, "_rsa_hf_adapter"):
        return
    names = list(inspect.signature(original).parameters)[1:] if callable(original) else []
    missing = [name for name in adapter.parameters if name not in names]
    if not callable(original) or missing:
        wanted = f"{adapter.method}({', '.join(adapter.parameters)})"
        raise RuntimeError(_unexpected(adapter, f"to define {wanted}", missing or [adapter.method]))

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if heads_of(self) is None and not _watching.watchers:
            return original(self, *args, **keywords)
        call = dict(zip(names, args, strict=False)) | keywords
        return adapter.run(self, original, call, functools.partial(mix_recurrence, self))

    method._rsa_hf_adapter = adapter  # type: ignore[attr-defined]
    setattr(cls, adapter.method, method)


def _unexpected(adapter: Adapter, expected: str, missing: list[str]) -> str:
    return (
        f"{what_fits()} {adapter.path}.{adapter.name} was expected {expected}, but {', '.join(missing)} is missing. "
        "Install a transformers version that rsa_hf was tested with, or a newer rsa_hf."
    )


def _not_seen(module: nn.Module, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(module).__name__} did not call {what} in its forward, so that RSA could not be mixed in. Use the "
        "model's default settings of attention (for Bloom: slow_but_exact=False)."
    )


# --- attention as a method of its own -------------------------------------------------------------------------------


def _run_attn(module: nn.Module, attn: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """GPT-J, CodeGen: `_attn` takes Q, K, V as [B, H, T or S, D] and returns [B, H, T, D] and the weights."""
    output, weights = attn(module, **call)
    mixed = mix(output.transpose(1, 2), call["value"], call.get("attention_mask"), causal=True)
    return mixed.transpose(1, 2), weights


def _run_gpt_neo(module: Any, attn: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """GPT-Neo: as GPT-J, but the mask says nothing of the window of a local layer."""
    output, weights = attn(module, **call)
    mask, window = call.get("attention_mask"), None
    if module.attention_type == "local":
        window = module.config.window_size
        if mask is not None:
            mask = remembered(_within_window, mask, output.shape[2], call["value"].shape[2], window)
    mixed = mix(output.transpose(1, 2), call["value"], mask, causal=True, sliding_window=window)
    return mixed.transpose(1, 2), weights


def _run_xlnet(module: nn.Module, core: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """XLNet: `rel_attn_core` takes Q, K, V as [T or S, B, H, D]; S counts memories too. Once for each stream.

    The query stream has a query at every position, so that its recurrence is that of the content stream.
    """
    found = core(module, **call)
    output = found[0] if isinstance(found, tuple) else found
    value, mask = call["v_head_h"].permute(1, 2, 0, 3), call.get("attn_mask")
    # The only trace of the direction: distances from S to −T in a bidirectional model, from S to 0 in a causal one.
    causal = call["k_head_r"].shape[0] == value.shape[2] + 1
    if mask is not None:
        mask = remembered(_xlnet_visible, mask, causal)
    mixed = mix(output.transpose(0, 1), value, mask, causal=causal).transpose(0, 1)
    return (mixed, *found[1:]) if isinstance(found, tuple) else mixed


# --- attention between a cache and a projection ---------------------------------------------------------------------


def _through_cache(
    cache: str,
    heads: str,
    projection: str,
    *,
    hides: bool = False,
    positions: bool = False,
    decoder: str | None = None,
) -> Run:
    """For a forward that calls `key, value = cache.update(key, value, layer)` and `projection(output)`.

    Args:
        cache: the forward's parameter.
        heads: the attribute that holds H.
        projection: the attribute; it is called with [B, T, H * D].
        hides: True in a mask means hidden.
        positions: `position_ids` tell flash attention of packed documents.
        decoder: the attribute that says whether it is causal; None: it is.
    """

    def run(module: nn.Module, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
        seen = _Cache(call.get(cache))
        mask = call.get("attention_mask")
        causal = decoder is None or bool(getattr(module, decoder))
        if hides and mask is not None:
            mask = remembered(torch.logical_not, mask)
        project = getattr(module, projection)
        mixed = False

        def mix_and_project(output: Tensor) -> Any:
            nonlocal mixed
            if seen.value is None:
                raise _not_seen(module, f"{cache}.update")
            attention, documents = output.unflatten(-1, (getattr(module, heads), -1)), None
            if positions and mask is None:
                documents = flash_documents(attention.transpose(1, 2), seen.value, call)
            mixed = True
            return project(mix(attention, seen.value, mask, causal=causal, documents=documents).flatten(2))

        stand_in = _StandIn(module, {projection: _StandInForCall(project, mix_and_project)})
        found = forward(stand_in, **{**call, cache: seen})
        if not mixed:
            raise _not_seen(module, projection)
        return found

    return run


class _Cache:
    """Stands in for the cache of a forward, or for none, and keeps the values that attention sees."""

    def __init__(self, cache: Any) -> None:
        # Of an encoder-decoder's two caches, self-attention has the one.
        self.cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        self.value: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Update the cache, if there is one: K and V of all positions, [B, Hv, S, D]."""
        if self.cache is not None:
            key, value = self.cache.update(key, value, *args, **keywords)
        self.value = value
        return key, value

    def get_seq_length(self, *args: Any) -> Any:
        """Number of cached positions."""
        return 0 if self.cache is None else self.cache.get_seq_length(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class _StandIn:
    """Stands in for `self` in a module's own forward: the module itself but for a few attributes."""

    _module: nn.Module

    def __init__(self, module: nn.Module, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class _StandInForCall:
    """Stands in for a child module: the child itself, but when it is called."""

    def __init__(self, child: nn.Module, call: Callable[[Tensor], Any]) -> None:
        self.child, self.call = child, call

    def __call__(self, states: Tensor) -> Any:
        return self.call(states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.child, name)


# --- attention that projects V and returns its output ---------------------------------------------------------------


def _through_projection(projection: str, values: Callable[[Any, Tensor], Tensor]) -> Run:
    """For a bidirectional forward that returns its output, [B, T, H * D], and the weights.

    Args:
        projection: the attribute that V comes from.
        values: takes the module and what the projection gave, and returns V, [B, H, S, D].
    """

    def run(module: Any, forward: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
        project, seen = getattr(module, projection), None

        def keep(states: Tensor) -> Any:
            nonlocal seen
            seen = project(states)
            return seen

        output, *rest = forward(_StandIn(module, {projection: _StandInForCall(project, keep)}), **call)
        if seen is None:
            raise _not_seen(module, projection)
        attention = output.unflatten(-1, (module.num_attention_heads, -1))
        mask = remembered(_deberta_visible, call["attention_mask"])
        return (mix(attention, values(module, seen), mask, causal=False).flatten(2), *rest)

    return run


def _deberta_values(module: Any, states: Tensor) -> Tensor:
    # Q, K and V of a head stand side by side; only Q and V have a bias, which is added when they are apart.
    value: Tensor = module.transpose_for_scores(states).chunk(3, dim=-1)[2]
    bias: Tensor = module.transpose_for_scores(module.v_bias[None, None, :])
    return value + bias


def _deberta_v2_values(module: Any, states: Tensor) -> Tensor:
    value: Tensor = states.unflatten(-1, (module.num_attention_heads, -1))
    return value.transpose(1, 2)


# --- masks ----------------------------------------------------------------------------------------------------------


def _within_window(mask: Tensor, T: int, S: int, window: int) -> Tensor:
    """What an additive mask [B, 1, T, S or more] and a window let queries see, the last T of S positions."""
    lags = (S - T + torch.arange(T, device=mask.device))[:, None] - torch.arange(S, device=mask.device)
    return (mask[..., :S] > HIDDEN_AT_OR_BELOW) & (lags < window)


def _deberta_visible(mask: Tensor) -> Tensor:
    """Turn a mask [B, 1, T, S], 0 where a key is hidden, into a boolean one.

    It hides all keys from padding's own queries too. What those give is never read, so they are shown the keys that
    others see: then padding alone is no mask of its own shape, and P V takes linear time.
    """
    visible = mask.bool()
    return visible | (visible.any(dim=-2, keepdim=True) & ~visible.any(dim=-1, keepdim=True))


def _xlnet_visible(mask: Tensor, causal: bool) -> Tensor:
    """Turn a mask [T, S, B or 1, 1], 1 where a key is hidden, into [B or 1, 1, T, S], True where it is visible.

    Whether a query sees itself makes no difference to recurrence, f(0) = 0, but differs between the streams, and for
    padding. It is set to whether other queries see that key: then a mask of padding and direction, for which P V
    takes linear time, looks like one in both streams.
    """
    visible = mask.permute(2, 3, 0, 1) == 0
    T, S = visible.shape[-2:]
    own = torch.eye(T, dtype=torch.bool, device=mask.device)
    own = torch.cat([own.new_zeros(T, S - T), own], dim=1)
    seen = (visible & ~own).any(dim=-2, keepdim=True)
    if causal:
        seen[..., -1] = True  # nobody else can see it, and it tells where the queries stand
    return torch.where(own, seen, visible)


_FORWARD = ("hidden_states", "attention_mask")
_QKV = ("query", "key", "value", "attention_mask")

ADAPTERS = (
    Adapter(
        "bloom.modeling_bloom",
        "BloomAttention",
        "forward",
        (*_FORWARD, "layer_past"),
        ("num_heads", "dense"),
        _through_cache("layer_past", "num_heads", "dense"),
    ),
    Adapter("codegen.modeling_codegen", "CodeGenAttention", "_attn", _QKV, (), _run_attn),
    Adapter(
        "deberta.modeling_deberta",
        "DisentangledSelfAttention",
        "forward",
        _FORWARD,
        ("num_attention_heads", "in_proj", "transpose_for_scores", "v_bias"),
        _through_projection("in_proj", _deberta_values),
    ),
    Adapter(
        "deberta_v2.modeling_deberta_v2",
        "DisentangledSelfAttention",
        "forward",
        _FORWARD,
        ("num_attention_heads", "value_proj"),
        _through_projection("value_proj", _deberta_v2_values),
    ),
    Adapter(
        "falcon.modeling_falcon",
        "FalconAttention",
        "forward",
        (*_FORWARD, "layer_past"),
        ("num_heads", "dense"),
        _through_cache("layer_past", "num_heads", "dense"),
    ),
    Adapter(
        "falcon.modeling_falcon",
        "FalconFlashAttention2",
        "forward",
        (*_FORWARD, "layer_past", "position_ids"),
        ("num_heads", "dense"),
        _through_cache("layer_past", "num_heads", "dense", positions=True),
    ),
    Adapter(
        "gpt_neo.modeling_gpt_neo", "GPTNeoSelfAttention", "_attn", _QKV, ("attention_type", "config"), _run_gpt_neo
    ),
    Adapter(
        "gpt_neo.modeling_gpt_neo",
        "GPTNeoFlashAttention2",
        "forward",
        (*_FORWARD, "layer_past"),
        ("num_heads", "out_proj"),
        _through_cache("layer_past", "num_heads", "out_proj"),
    ),
    Adapter("gptj.modeling_gptj", "GPTJAttention", "_attn", _QKV, (), _run_attn),
    Adapter(
        "gptj.modeling_gptj",
        "GPTJFlashAttention2",
        "forward",
        (*_FORWARD, "layer_past"),
        ("num_attention_heads", "out_proj"),
        _through_cache("layer_past", "num_attention_heads", "out_proj"),
    ),
    Adapter(
        "informer.modeling_informer",
        "InformerProbSparseAttention",
        "forward",
        (*_FORWARD, "past_key_values"),
        ("num_heads", "out_proj", "is_decoder"),
        _through_cache("past_key_values", "num_heads", "out_proj", decoder="is_decoder"),
    ),
    Adapter(
        "mpt.modeling_mpt",
        "MptAttention",
        "forward",
        (*_FORWARD, "past_key_values"),
        ("n_heads", "out_proj"),
        _through_cache("past_key_values", "n_heads", "out_proj", hides=True),
    ),
    Adapter(
        "xlnet.modeling_xlnet",
        "XLNetRelativeAttention",
        "rel_attn_core",
        ("v_head_h", "k_head_r", "attn_mask"),
        (),
        _run_xlnet,
    ),
)
_BY_CLASS = {(adapter.path, adapter.name): adapter for adapter in ADAPTERS}
_MODULES = {adapter.path for adapter in ADAPTERS}
