"""Mixes recurrence into the output of attention modules that have a child named `rsa`.

Most modules get their attention function from transformers' attention interface, which `wrap_get_interface` wraps.
Classes in `architectures/table.py` compute attention themselves: `connect` wraps a method of theirs. Both ways lead to
`mix_recurrence`, which reads the mask and calls the heads. A trial run records the calls of both.
"""

import copyreg
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from rsa_hf.children import heads_of
from rsa_hf.integration import trial, what_fits
from rsa_hf.integration.architectures.table import ARCHITECTURES, Architecture
from rsa_hf.integration.paged import paged_attention_with_rsa
from rsa_hf.integration.positions import (
    positions_of_queries,
    require_all_keys,
    require_no_gaps,
    require_own_keys,
    start_of_queries,
    warn_of_gaps,
)
from rsa_hf.integration.split_layers import layer_shape, run_heads
from rsa_hf.ops.read_mask import flash_document_ids, read_attention_mask

_BY_CLASS = {(architecture.path, architecture.name): architecture for architecture in ARCHITECTURES}

# Classes whose `is_causal` is False in encoder and decoder alike: the attribute that says whether a layer is causal.
_DIRECTION_ATTRIBUTES = {"InformerAttention": "is_decoder"}

# Classes whose mask hides keys with −100 rather than −10,000 or less.
_HIDE_WITH_MINUS_100 = {"SwinAttention"}

# transformers' mask functions: sdpa's leaves out the mask of a first text in a static cache; three put windows and
# packed documents into their masks, and flash attention's leaves these to keywords.
_SDPA_MASKS, _FLASH_MASKS = MASKS["sdpa"], MASKS["flash_attention_2"]
_WITH_WINDOWS = (_SDPA_MASKS, MASKS["eager"], MASKS["flex_attention"])


# --- modules that use the attention interface -----------------------------------------------------------------------


def wrap_get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mix recurrence into the output of attention modules that have RSA heads."""

    def get_interface(self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]) -> Any:
        base = original(self, attn_implementation, default)
        return functools.partial(_attention_with_rsa, base, attn_implementation or "eager")

    return get_interface


def _attention_with_rsa(
    base: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **keywords: Any,
) -> Any:
    """Call an attention function of transformers. Q, K and V are [B, H, T, D] and [B, Hkv, S, D]."""
    if (rsa := heads_of(module)) is None and trial.state.calls is None:
        return base(module, query, key, value, attention_mask, *args, **keywords)
    if rsa is not None:
        _note_heads_ran(module)
    causal = keywords.get("is_causal")
    if causal is None:
        causal = getattr(module, _DIRECTION_ATTRIBUTES.get(type(module).__name__, "is_causal"), None)
    causal = None if causal is None else bool(causal)

    def attend(query: Tensor, value: Tensor) -> Any:
        return base(module, query, key, value, attention_mask, *args, **keywords)

    if (calls := trial.state.calls) is not None and query.shape[2] == key.shape[2]:
        # Not cross-attention. Zero queries weight all keys that they see equally.
        seen = attend(torch.zeros_like(query), trial.marks_of(value))
        calls.append(_call(module, trial.attention_output(seen, implementation, query, value), value, causal))
    foreign = trial.foreign_part(base)
    if foreign is not None and rsa is not None:
        planned = causal if rsa.spec.causal is None else rsa.spec.causal
        is_causal = bool(planned) and query.shape[2] > 1 and (attention_mask is None or attention_mask.dim() == 2)
        in_cache = keywords.get("cache") is not None
        trial.require_trusted(attend, foreign, implementation, query, value, is_causal=is_causal, fills_cache=in_cache)
    if "write_index" in keywords:  # of a paged cache
        return paged_attention_with_rsa(base, module, query, key, value, attention_mask, *args, **keywords)
    T, S = query.shape[2], key.shape[2]
    has_more_keys, result = T < S, attend(query, value)
    masks, aligned_top_left = MASKS.get(implementation), False
    if has_more_keys and rsa is not None:
        require_own_keys(module, S)
        is_known = attention_mask is not None or T == 1 or masks in (*_WITH_WINDOWS, _FLASH_MASKS)
        aligned_top_left = masks is _SDPA_MASKS if is_known else trial.is_aligned_top_left(attend, query, value)
    mixed = mix_recurrence(
        module,
        result[0] if foreign is None else trial.attention_output(result, implementation, query, value),
        value,
        attention_mask > -50 if type(module).__name__ in _HIDE_WITH_MINUS_100 else attention_mask,
        causal,
        aligned_top_left=aligned_top_left,
        flash=None if masks in _WITH_WINDOWS else keywords,
        positions=positions_of_queries(module, keywords) if has_more_keys or attention_mask is not None else None,
        start=start_of_queries(keywords, T) if 1 < T < S else None,
        hides_later=masks in (_SDPA_MASKS, _FLASH_MASKS),
    )
    return mixed, result[1]


def _call(module: nn.Module, output: Tensor, value: Tensor, stated: bool | None) -> trial.AttentionCall:
    """The record of a call, from attention's output on marks, [B, T, H, D], and V, [B, Hv, S, D]."""
    shape = layer_shape(module, output, value)
    shown = stated if output.is_meta else trial.direction_shown(output, stated)
    return trial.AttentionCall(module, shape, output.shape[1], value.shape[2], stated, shown)


# --- modules that do not use the attention interface ----------------------------------------------------------------


def architecture_of(module: nn.Module) -> Architecture | None:
    """The row of `architectures/table.py` for an attention module's class; None if it has none."""
    rows = (_BY_CLASS.get((cls.__module__, cls.__name__)) for cls in type(module).__mro__)
    # A class that no longer has the method uses the interface.
    return next((row for row in rows if row is not None and hasattr(module, row.method)), None)


def connect(model: nn.Module) -> None:
    """Wrap the classes of a model's attention modules that have a row in the table, once in a process.

    The modules around attention with RSA heads are checked after each forward from then on.
    """
    owners = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    config_of = {module: owner.config for owner in owners for module in owner.modules()}  # that of the innermost owner
    graphs = SimpleNamespace(have_heads=False)  # one for all layers, which may share a compiled graph
    for module in model.modules():
        row, heads = architecture_of(module), heads_of(module)
        if heads is not None:
            module._rsa_graphs = graphs  # type: ignore[assignment]
        if row is None:
            continue
        wrap_class(row.path, row.name)
        if heads is not None:
            heads.architecture, heads.model_config = row, None if row.is_always_causal else config_of.get(module)
        if row.method == "forward" and "_old_forward" in vars(module):
            # Accelerate's hooks keep the forward from before the class was wrapped.
            module._old_forward = type(module).forward.__get__(module)
    trial.state.heads_ran = False  # a trial run may have set it
    for module in _around_attention(model):
        if _require_heads_ran not in module._forward_hooks.values():
            module.register_forward_hook(_require_heads_ran)


def _around_attention(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules that call attention modules with RSA heads."""
    parents = {parent for parent in model.modules() if any(heads_of(child) is not None for child in parent.children())}
    for parent in parents:
        if isinstance(parent, nn.ModuleList):  # which is not called, so there a replaced module goes unnoticed
            yield from (child for child in parent if heads_of(child) is not None)
        elif parents.isdisjoint(list(parent.modules())[1:]):
            yield parent


def _note_heads_ran(module: nn.Module) -> None:
    """Let `_require_heads_ran` know that the RSA heads of a module take part in its attention."""
    if torch.compiler.is_compiling():
        _note_in_graph(module._rsa_graphs)
    else:
        trial.state.heads_ran = True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # so it runs once, while a graph is traced
def _note_in_graph(graphs: Any) -> None:
    graphs.have_heads = True  # a graph cannot write to the state of a thread


def _require_heads_ran(module: nn.Module, args: Any, output: Any) -> None:
    """Check, after the forward of a module around attention, that its RSA heads took part."""
    if torch.compiler.is_compiling():
        _require_heads_in_graph(module)
        return
    ran, trial.state.heads_ran = trial.state.heads_ran, False
    if not ran:
        _require_heads_compiled(module)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _require_heads_in_graph(module: nn.Module) -> None:
    if not trial.state.heads_ran:  # as they do between two graphs
        _require_heads_compiled(module)


def _require_heads_compiled(module: nn.Module) -> None:
    attention: Any = next((part for part in module.modules() if heads_of(part) is not None), None)
    if attention is None or attention._rsa_graphs.have_heads:
        return
    raise RuntimeError(
        f"the RSA heads of {type(attention).__name__} took no part in this forward: the module was replaced, or "
        "computes attention without transformers' attention interface, as some code does for "
        "attn_implementation='eager' or output_attentions=True only. Use the settings and the code that the model "
        "was patched with, or unpatch_model(model). To skip a layer, replace it, or its output in a forward hook."
    )


def disconnect(model: nn.Module) -> None:
    """Remove the checks of `connect` from the modules of a model."""
    for module in model.modules():
        vars(module).pop("_rsa_graphs", None)
        for key in [key for key, hook in module._forward_hooks.items() if hook is _require_heads_ran]:
            del module._forward_hooks[key]


def wrap_class(path: str, name: str) -> Architecture:
    """Wrap the method of one class in the table, unless it is wrapped already, and return its row.

    Raises a RuntimeError if the class is not as expected.
    """
    row, cls = _BY_CLASS[path, name], getattr(importlib.import_module(path), name)
    original = vars(cls).get(row.method)
    if hasattr(original, "_rsa_hf_architecture"):
        return row
    names = list(inspect.signature(original).parameters)[1:] if callable(original) else []
    missing = [name for name in row.parameters if name not in names]
    if not callable(original) or missing:
        raise RuntimeError(
            f"{what_fits()} {row.path}.{row.name} was expected to define {row.method}({', '.join(row.parameters)}), "
            f"but {', '.join(missing) or row.method} is missing. Install a transformers version that rsa_hf was "
            "tested with, or a newer rsa_hf."
        )

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        calls = trial.state.calls
        if heads_of(self) is None and calls is None:
            return original(self, *args, **keywords)
        call = dict(zip(names, args, strict=False)) | keywords
        _note_heads_ran(self)

        def record(attention: Tensor, value: Tensor, mask: Tensor | None, causal: bool, **more: Any) -> Tensor:
            assert calls is not None
            calls.append(_call(self, attention, value, causal))
            return attention

        if calls is not None:
            with trial.marking():
                row.run(self, original, call, record)
        return row.run(self, original, call, functools.partial(mix_recurrence, self, hides_later=row.is_always_causal))

    method._rsa_hf_architecture = row  # type: ignore[attr-defined]
    setattr(cls, row.method, method)
    return row


# Patched layers carry their row, so that unpickling one in a new process wraps its class there.
copyreg.pickle(Architecture, lambda row: (wrap_class, (row.path, row.name)))


# --- eq. 4 ----------------------------------------------------------------------------------------------------------


def mix_recurrence(
    module: nn.Module,
    attention: Tensor,
    value: Tensor,
    mask: Any,
    causal: bool | None,
    *,
    aligned_top_left: bool = False,
    sliding_window: int | None = None,
    flash: Mapping[str, Any] | None = None,
    positions: Tensor | None = None,
    start: int | None = None,
    hides_later: bool = False,
) -> Tensor:
    """Mix P V into the output of attention, [B, T, H, D], if the module has RSA heads.

    V, [B, Hv, S, D], includes cached positions or memories. The plan's direction overrides `causal`, that of the call.
    `mask` says which keys are seen, as in `read_attention_mask`; `sliding_window`, or `flash`, the keywords of a call
    of flash attention, say what it does not. `positions`, [B or 1, T], are those of the queries in their texts, if the
    cache keeps all keys; `start` is the first of them in any case. With `hides_later`, attention of a causal call
    hides later keys even if its mask does not, so the plan cannot show them. Raises a ValueError if nothing says
    whether attention is causal, the layer has other heads than when it was patched, the cache has lost keys, or there
    is padding between keys.
    """
    rsa = heads_of(module)
    if rsa is None:
        return attention
    if rsa.spec.causal is not None and not (hides_later and causal and getattr(mask, "ndim", 2) == 2):
        causal = rsa.spec.causal
    elif getattr(rsa.model_config, "is_causal", None) is False:
        causal = False  # modules that do not use the interface see this only in their mask
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} does not say whether it is causal. Patch with RSAConfig(causal=True) or "
            "RSAConfig(causal=False)."
        )
    document_ids = None
    if flash is not None:
        sliding_window = flash.get("sliding_window")
        document_ids = flash_document_ids(attention, value, flash) if mask is None else None
    visible = read_attention_mask(
        attention,
        value,
        mask,
        causal=causal,
        aligned_top_left=aligned_top_left,
        sliding_window=sliding_window,
        document_ids=document_ids,
        start=start,
    )
    if not causal:
        warn_of_gaps(visible)
    elif positions is not None:
        require_all_keys(visible, positions)
    elif visible.query_length < visible.key_length and not getattr(type(module), "positions_are_slots", False):
        require_no_gaps(visible)
    return run_heads(module, rsa, attention, value, visible)
