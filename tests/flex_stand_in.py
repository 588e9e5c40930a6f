"""Flex attention on the CPU without its compiler, to run transformers' own flex attention code fast, and backwards.

torch's kernels take long to compile, and have no backward pass on the CPU. This follows the documentation of
BlockMask: keys of full blocks are seen, `mask_mod` decides in partial blocks, and other blocks are skipped.
"""

import torch
from torch.nn.attention.flex_attention import create_mask


def visible_keys(block_mask, B, H, T, S):
    """Which keys each query sees, [B, H, T, S], block by block."""
    height, width = block_mask.BLOCK_SIZE
    by_function = create_mask(block_mask.mask_mod, B, H, T, S, "cpu")
    visible = torch.zeros(B, H, T, S, dtype=torch.bool)
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, by_function)]
    if block_mask.full_kv_num_blocks is not None:
        everything = torch.ones_like(by_function)
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, everything))
    for counts, indices, seen in lists:
        counts, indices = counts.expand(B, H, -1).tolist(), indices.expand(B, H, -1, -1).tolist()
        for b in range(B):
            for h in range(H):
                for row, count in enumerate(counts[b][h]):
                    for column in indices[b][h][row][:count]:
                        block = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
                        visible[b, h][block] = seen[b, h][block]
    return visible


def attention(
    query, key, value, training=False, score_mod=None, block_mask=None, enable_gqa=False, scale=None, **unused
):
    """Attention of query [B, H, T, D] to key, value [B, Hkv, S, D]; returns [B, H, T, D]."""
    (B, H, T, D), S = query.shape, key.shape[2]
    key, value = (x.repeat_interleave(H // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    if score_mod is not None:
        for place in (4, 3, 2, 1):  # the last index is the innermost
            score_mod = torch.vmap(score_mod, in_dims=(0, *(0 if i == place else None for i in (1, 2, 3, 4))))
        scores = score_mod(scores, *(torch.arange(n) for n in (B, H, T, S)))
    if block_mask is not None:
        hidden = ~visible_keys(block_mask, B, H, T, S)
        nothing = hidden.all(-1, keepdim=True)
        scores = scores.masked_fill(hidden & ~nothing, -torch.inf)
        return scores.softmax(-1).masked_fill(nothing, 0.0) @ value
    return scores.softmax(-1) @ value
