"""Modules with a method that computes attention from Q, K and V: GPT-Neo, GPT-J, CodeGen, OpenAI-GPT and XLNet."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rsa_hf.integration.trial import marked
from rsa_hf.ops.mask import remembered
from rsa_hf.ops.read_mask import HIDDEN_AT_OR_BELOW


def run_attn(module: nn.Module, attn: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """GPT-J and others: `_attn` takes Q, K, V as [B, H, T or S, D] and returns [B, H, T, D] and the weights."""
    value = marked(call["value"])
    output, weights = attn(module, **{**call, "value": value})
    return mix(output.transpose(1, 2), value, call.get("attention_mask"), causal=True).transpose(1, 2), weights


def run_gpt2(module: Any, attn: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """GPT-2 with `reorder_and_upcast_attn` and eager attention: as GPT-J, but it returns [B, T, H, D]."""
    value = marked(call["value"])
    output, weights = attn(module, **{**call, "value": value})
    return mix(output, value, call.get("attention_mask"), causal=not module.is_cross_attention), weights


def run_gpt_neo(module: Any, attn: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """GPT-Neo: as GPT-J, but the mask does not include the window of a local layer."""
    value, mask, window = marked(call["value"]), call.get("attention_mask"), None
    output, weights = attn(module, **{**call, "value": value})
    if module.attention_type == "local":
        window = module.config.window_size
        if mask is not None:
            mask = remembered(_within_window, mask, output.shape[2], value.shape[2], window)
    return mix(output.transpose(1, 2), value, mask, causal=True, sliding_window=window).transpose(1, 2), weights


def _within_window(mask: Tensor, T: int, S: int, window: int) -> Tensor:
    """Boolean mask from an additive one, [B, 1, T, S or more], and a window; queries are the last T of S positions."""
    lags = (S - T + torch.arange(T, device=mask.device))[:, None] - torch.arange(S, device=mask.device)
    return (mask[..., :S] > HIDDEN_AT_OR_BELOW) & (lags < window)


def run_openai_gpt(
    module: nn.Module, attn: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]
) -> Any:
    """OpenAI-GPT: `_attn` takes V, [B, H, S, D], and a mask of padding only, [B, 1, 1, S]; it returns a list."""
    value, mask = marked(call["v"]), call.get("attention_mask")
    output, *weights = attn(module, **{**call, "v": value})
    if mask is not None:
        mask = remembered(_real_keys, mask)
    return [mix(output.transpose(1, 2), value, mask, causal=True).transpose(1, 2), *weights]


def _real_keys(mask: Tensor) -> Tensor:
    """An additive mask [B, 1, 1, S] as [B, S], True for real keys."""
    return mask[:, 0, 0] > HIDDEN_AT_OR_BELOW


def run_xlnet(module: nn.Module, core: Callable[..., Any], call: dict[str, Any], mix: Callable[..., Tensor]) -> Any:
    """XLNet: `rel_attn_core`, called once per stream, takes Q, K, V as [T or S, B, H, D]; S includes memories.

    The query stream has a query at every position, so its P V is that of the content stream.
    """
    values = marked(call["v_head_h"], dim=0)
    found = core(module, **{**call, "v_head_h": values})
    output, *weights = found if isinstance(found, tuple) else (found,)
    value, mask = values.permute(1, 2, 0, 3), call.get("attn_mask")
    # Only the relative positions show the direction: S … −T in a bidirectional model, S … 0 in a causal one.
    causal = call["k_head_r"].shape[0] == value.shape[2] + 1
    if mask is not None:
        mask, unseen = remembered(_xlnet_visible, mask, causal)
        if unseen is not None:
            value = value.masked_fill(unseen.transpose(-1, -2), 0)
    mixed = mix(output.transpose(0, 1), value, mask, causal=causal).transpose(0, 1)
    return (mixed, *weights) if isinstance(found, tuple) else mixed


def _xlnet_visible(mask: Tensor, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Turn a mask [T, S, B or 1, 1], 1 where a key is hidden, into [B or 1, 1, T, S], True where it is visible.

    Whether a query sees itself differs between the streams, and for padding, but does not matter to P V: f(0) = 0. It
    is set to whether other queries see that key, so both streams have a mask of only direction and padding, for which
    P V takes linear time. Nor would the mask show the place of queries after memories if no query saw the last key, as
    in `generate`. So in a bidirectional model such keys count as visible, and those in the second result, [B or 1, 1,
    1, S], need values of 0.
    """
    visible = mask.permute(2, 3, 0, 1) == 0
    T, S = visible.shape[-2:]
    own = torch.eye(T, dtype=torch.bool, device=mask.device)
    own = torch.cat([own.new_zeros(T, S - T), own], dim=1)
    seen = (visible & ~own).any(dim=-2, keepdim=True)
    if causal:
        seen[..., -1] = True  # no other query can see the last key, which determines the queries' position
    visible = torch.where(own, seen, visible)
    return (visible, None) if causal or T == S else (visible | ~seen, ~seen)
