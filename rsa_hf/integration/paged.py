"""Continuous batching: many requests in one row, over a paged cache (`generate_batch`, `transformers serve`).

The queries of all requests lie one after the other, as do their keys; a request's queries are at its last keys. So the
keys form a row of packed documents, and its P V is read at the positions of the queries.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from rsa_hf.children import heads_of
from rsa_hf.integration import what_fits
from rsa_hf.integration.split_layers import run_heads
from rsa_hf.layer import RSAHeads
from rsa_hf.ops.mask import AttentionMask, remembered
from rsa_hf.ops.read_mask import as_boolean

_NO_FLASH = (
    "RSA does not work with continuous batching under flash attention, which reads the cache itself: the values of "
    "earlier tokens cannot be seen. Use model.set_attn_implementation('sdpa') or ('eager'), or model.generate(...)."
)


class _StandInForPagedCache(PagedAttentionCache):
    """A cache that keeps what attention gets: V, [1, Hv, S, D], and the ends of each request's keys, after a 0."""

    value: Tensor
    key_ends: Tensor

    def __init__(self, cache: PagedAttentionCache) -> None:
        self.cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        key, self.value = self.cache.update(key_states, value_states, layer_idx, kwargs)
        self.key_ends = kwargs["cu_seq_lens_k"]  # the cache has put the layer's own there
        return key, self.value


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as the cache is: it reads lengths from tensors
def paged_attention_with_rsa(base: Callable[..., Any], module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """Call an attention function of transformers for the requests of a paged cache, and mix in P V.

    `arguments` are Q, [1, H, T, D]; K and V, [1, Hv, S, D]; the additive mask, [1, 1, T, S]; and any others.
    Before transformers 5.24 it also takes the cache, and K and V are those of the T queries.
    """
    rsa, mask = cast(RSAHeads, heads_of(module)), arguments[3]
    if keywords.get("block_table") is not None or mask is None:
        raise NotImplementedError(_NO_FLASH)
    if rsa.spec.causal is False:
        raise NotImplementedError("Continuous batching is causal: RSAConfig(causal=False) works with generate() only.")
    seen = None
    if "cache" in keywords:
        keywords["cache"] = seen = _StandInForPagedCache(keywords["cache"])
    output, weights = base(module, *arguments, **keywords)
    value, key_ends = (arguments[2], keywords["cu_seq_lens_k"]) if seen is None else (seen.value, seen.key_ends)
    ends = (tuple(remembered(Tensor.tolist, x)) for x in (keywords["cu_seq_lens_q"], key_ends))
    visible, places = remembered(_read_requests, mask, *ends)
    attention = output[0, : len(places)]
    if places.dim() == 2:
        mixed = run_heads(module, rsa, attention[:, None], value[0, :, places].transpose(0, 1), visible)[:, 0]
    else:
        of_keys = attention.new_zeros(visible.key_length, *attention.shape[1:])
        of_keys[places] = attention
        mixed = run_heads(module, rsa, of_keys[None], value[:, :, : visible.key_length], visible)[0, places]
    attention.copy_(mixed)
    return output, weights


def _read_requests(mask: Tensor, *ends: tuple[int, ...]) -> tuple[AttentionMask, Tensor]:
    """Read the mask of a call, [1, 1, T, S]; `ends` are the ends of each request's queries and keys, after a 0.

    Returns:
        The mask of all packed keys, each as a query, and the positions of the queries among them, [T]. If each request
        has one query, and all have similar lengths: the mask of a batch, and the keys of each row, [T, keys].
    """
    count = ends[0].index(ends[0][-1])  # static sizes add requests without queries at the end
    query_ends, key_ends = torch.tensor(ends, device=mask.device)[:, : count + 1]
    queries, lengths, T, S = query_ends.diff(), key_ends.diff(), ends[0][count], ends[1][count]
    # The last query of a request sees all its keys, or those in the layer's window. A request that will be forked may
    # have no query in a step.
    asks = queries > 0
    last = query_ends[1:][asks] - 1
    counts = as_boolean(mask[:, :, last], len(last), S).sum(-1).flatten()
    windows = counts[counts != lengths[asks]].unique().tolist()
    if len(windows) > 1:
        raise NotImplementedError(f"RSA cannot read a mask with windows of {windows} keys: one per layer is possible.")
    window, longest = windows[0] if windows else None, int(lengths.max())
    if count == T == len(last) and T * longest <= 2 * S:
        keys = key_ends[1:, None] - torch.arange(longest, 0, -1, device=mask.device)
        padding = None if T * longest == S else keys >= key_ends[:-1, None]
        return AttentionMask(1, longest, longest - 1, True, padding, sliding_window=window), keys.clamp(min=0)
    positions = torch.arange(T, device=mask.device) + (key_ends - query_ends)[1:].repeat_interleave(queries)
    ids = torch.arange(count, device=mask.device).repeat_interleave(lengths)
    return AttentionMask(S, S, 0, True, documents=ids[None], sliding_window=window), positions


def wrap_init_continuous_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep patched models off flash attention and CUDA graphs, or refuse before the generating thread starts."""

    def init_continuous_batching(
        self: Any, generation_config: Any = None, continuous_batching_config: Any = None, *args: Any, **keywords: Any
    ) -> Any:
        patched = [heads for module in self.modules() if (heads := heads_of(module)) is not None]
        if not patched:
            return original(self, generation_config, continuous_batching_config, *args, **keywords)
        if "flash" in str(self.config._attn_implementation):
            raise NotImplementedError(_NO_FLASH)
        if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
            raise NotImplementedError(f"Continuous batching with RSA needs transformers 5.20 or newer. {what_fits()}")
        for row in (heads.architecture for heads in patched):
            # GPT-2 has a row for plain eager attention only, which continuous batching replaces.
            if row is not None and row.method != "_upcast_and_reordered_attn":
                raise NotImplementedError(
                    f"RSA does not work with continuous batching of {row.name}: it computes attention without the "
                    "paged cache, so the plain model is wrong or fails too. Use model.generate(...) instead."
                )
        inherited = getattr(generation_config or self.generation_config, "continuous_batching_config", None)
        options = copy.copy(continuous_batching_config or inherited or ContinuousBatchingConfig())
        options.use_cuda_graph = options.auto_switch_to_flash = False  # lengths are read on the host
        return original(self, generation_config, options, *args, **keywords)

    return init_continuous_batching


def forget_paged_cache(model: Any) -> None:
    """Drop a persistent manager of continuous batching: its cache holds prompts as the model read them until now."""
    if hasattr(model, "destroy_cached_continuous_batching_manager"):
        model.destroy_cached_continuous_batching_manager()
