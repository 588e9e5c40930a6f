"""Checks that the slots of cached keys, in which P V counts distances, are the positions of a text."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rsa_hf.ops.mask import AttentionMask, remembered
from rsa_hf.rem import is_recorded, is_transformed

# Positions count from 0, from 1 (PaliGemma) or from 2 (RoBERTa, after its padding index).
_LARGEST_FIRST_POSITION = 2
_FAR = 2**40  # beyond all positions

_PADDED = (
    "there is padding between the tokens of a row. RSA counts distances in slots of the cache, so the padding would "
    "change the result: give rows of one length after cached tokens, or pad whole texts on the left and run them "
    "without a cache, or unpatch_model(model)."
)


def require_own_keys(module: nn.Module, key_length: int) -> None:
    """Refuse a cache that may hide a query's own key, by which its position is found, or drop keys."""
    config = getattr(getattr(module, "config", None), "__dict__", {})
    kept = config.get("index_topk") or config.get("indexer_budget") or config.get("keep_window_size")
    if "reference_sliding_attention" in (config.get("layer_types") or ()):
        kept = config.get("sliding_window")
    if kept is not None and key_length > kept:
        raise NotImplementedError(
            f"this {type(module).__name__} attends to {kept} of {key_length} keys. RSA finds the place of a query in "
            f"a cache by its own key and those before it, which may be missing: use caches of up to {kept} tokens, or "
            "use_cache=False, or unpatch_model(model)."
        )


def positions_of_queries(module: nn.Module, keywords: Mapping[str, Any]) -> Tensor | None:
    """Positions of the queries, [B or 1, T], from which `require_all_keys` can judge the keys; None if it cannot."""
    positions = keywords.get("position_ids")
    if type(positions) is not Tensor or positions.dim() != 2 or "cache" in keywords:
        return None  # M-RoPE has several axes, and a paged cache several texts
    # Not read as an attribute: a config whose layers differ refuses that.
    of_config = getattr(getattr(module, "config", None), "__dict__", {}).get("sliding_window")
    if keywords.get("sliding_window", of_config) or torch.compiler.is_compiling() or is_transformed():
        return None  # a window drops keys; a graph or a transform has no values to look at
    return positions


def start_of_queries(keywords: Mapping[str, Any], query_length: int) -> int | None:
    """Position of the first query by `position_ids`, if attention is given them and they can be looked at."""
    positions = keywords.get("position_ids")
    if type(positions) is not Tensor or positions.dim() != 2 or positions.shape[1] != query_length:
        return None
    return None if is_recorded() or is_transformed() else remembered(_latest_start, positions)


def require_all_keys(mask: AttentionMask, positions: Tensor) -> None:
    """Check that positions count what P V counts: slots of the keys, from the first one that a row does not hide.

    A query whose position is beyond its slot has lost keys. One whose position is before its slot has padding between
    its keys, or tokens of another text that begins as its own does.
    """
    T, device = mask.query_length, positions.device.type
    # A single query on a GPU is not checked: decoding would wait for the device at each token.
    if positions.shape[1] != T or (T == 1 and device != "cpu"):
        return
    slot = mask.query_offset if mask.query_position is None else int(mask.query_position)
    if slot > 0:
        # Looking at a few numbers takes less time than remembering them.
        position = max(positions.tolist())[0] if T == 1 else remembered(_latest_start, positions)
        # A block of queries that all see each other may look like one query followed by padding.
        shown = mask.key_mask if mask.visible is None else mask.visible
        is_early = T > 1 and shown is not None and position < slot - remembered(_first_seen, shown)
        if is_early or position > slot + _LARGEST_FIRST_POSITION:
            raise ValueError(
                f"position_ids: a query is at position {position} of its text, but at slot {slot} of its cache, as if "
                "the cache had dropped keys, or had others. RSA counts distances in slots: use a cache that keeps all "
                "keys, or one of another length, or unpatch_model(model). position_ids must start at 0."
            )
    if T > 1 and mask.visible is not None and remembered(_is_tree, positions, mask):
        raise ValueError(
            "position_ids: the mask and the positions are those of several texts that begin alike, in one row. RSA "
            "counts distances in slots, so P V would depend on the order of the texts: give each of them a row, or "
            "unpatch_model(model)."
        )
    if _real_keys(mask) is not None and remembered(_has_padding, positions, mask):
        raise ValueError(_PADDED)


def require_no_gaps(mask: AttentionMask) -> None:
    """Check that there is no padding between cached keys and queries whose positions are not known."""
    shown = mask.key_mask if mask.visible is None else mask.visible
    if shown is None or is_recorded() or is_transformed():
        return
    if not (mask.query_length == 1 and shown.device.type != "cpu") and remembered(_has_gaps, shown, mask):
        raise ValueError(_PADDED)


def warn_of_gaps(mask: AttentionMask) -> None:
    """Warn of padding between the tokens of a row of a layer that looks both ways."""
    keys = mask.key_mask
    if keys is None or is_recorded() or is_transformed() or not remembered(_has_several_runs, keys):
        return
    warnings.warn(
        "there is padding between the tokens of a row. RSA counts distances in slots, so the padding changes P V: the "
        "result of an image may depend on the other images of its batch. Give images of one size, or a batch each.",
        stacklevel=2,
    )


def _has_several_runs(keys: Tensor) -> bool:
    """Whether the real keys of a row, of [B, S], are not next to each other."""
    return bool((keys[:, 1:] & ~keys[:, :-1]).sum(1).add(keys[:, 0]).gt(1).any())


def _real_keys(mask: AttentionMask) -> Tensor | None:
    """Which keys are not padding, [B or 1, S], if the mask says it for whole rows."""
    if mask.documents is not None:
        return None
    if mask.query_position is not None and mask.visible is not None:
        return mask.visible[:, 0, 0]
    return mask.key_mask


def _is_tree(positions: Tensor, mask: AttentionMask) -> bool:
    """Whether two queries see the same key at distances that do not differ as their positions do."""
    assert mask.visible is not None
    visible, slots = mask.visible[:, 0], torch.arange(positions.shape[1], device=positions.device)
    is_real = visible.any(1)[:, mask.query_offset :][:, : len(slots), None]
    start = (slots - positions)[..., None].expand(-1, -1, mask.key_length)  # [B, T, S]
    seen = visible & is_real
    return bool((torch.where(seen, start, -_FAR).amax(1) > torch.where(seen, start, _FAR).amin(1)).any())


def _has_padding(positions: Tensor, mask: AttentionMask) -> bool:
    """Whether padding that positions do not count stands between a real token and the first one of its row."""
    keys = _real_keys(mask)
    assert keys is not None
    steps, gaps = _steps_and_gaps(keys, mask)
    return bool((gaps & (steps > positions)).any())


def _has_gaps(shown: Tensor, mask: AttentionMask) -> bool:
    keys = _real_keys(mask)
    return keys is not None and bool(_steps_and_gaps(keys, mask)[1].any())


def _steps_and_gaps(keys: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Steps from the first real key of its row to each query, [B, T], and whether padding is among them."""
    slots = mask.query_offset + torch.arange(mask.query_length, device=keys.device)
    if mask.query_position is not None:
        slots = mask.query_position[None]
    steps = slots - keys.int().argmax(1, keepdim=True)
    return steps, (steps >= keys.cumsum(1)[:, slots]) & keys[:, slots]


def _first_seen(shown: Tensor) -> int:
    """The first slot that is seen in any row, of [B, S] or [B, H, T, S]."""
    return int(shown.flatten(0, -2).any(0).int().argmax())


def _latest_start(positions: Tensor) -> int:
    """Position of the first query, counted back from the query that is farthest ahead."""
    return int((positions - torch.arange(positions.shape[1], device=positions.device)).max())
