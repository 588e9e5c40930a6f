"""P V of one query in plain PyTorch: a step of decoding, as a weighted sum of the values in the cache."""

import torch
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask, boolean_mask
from rsa_hf.rem import Rems, constant, take_heads, weights_of_lags, working_dtype


def decode(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    """P V of a single causal query, [B, H, 1, D]: a weighted sum of values, without waiting for a device."""
    device, dtype = value.device, working_dtype(value)
    if mask.visible is None and mask.key_mask is None and mask.documents is None:
        # The position of the query is known, so the keys that it sees are a slice.
        end = mask.query_offset + 1
        seen = min(end, mask.sliding_window or end)
        weights = weights_of_lags(rems, torch.arange(seen - 1, -1, -1, device=device), dtype)
        return _weighted_sum(weights[None], value.narrow(2, end - seen, seen), rems)
    position = mask.query_offset if mask.query_position is None else mask.query_position
    tau = position - torch.arange(value.shape[2], device=device)
    weights = weights_of_lags(rems, tau, dtype)
    # f is 0 for keys after the query, so a mask that contains the position needs nothing but its row.
    visible = boolean_mask(mask, tau[None]) if mask.query_position is None else mask.visible
    assert visible is not None
    of_heads = take_heads(visible, rems.heads, dim=1) if visible.shape[1] > 1 else visible
    return _weighted_sum(weights * of_heads[:, :, 0], value, rems)


def _weighted_sum(weights: Tensor, value: Tensor, rems: Rems) -> Tensor:
    """Σ_s w_s v_s for weights [B or 1, H, S] and values [B, Hv, S, D]: [B, H, 1, D]."""
    # Heads that share a value head are the rows of one matrix product, with zeros for plain heads: V is read in
    # place. (`matmul` takes longer to bring its arguments to this form than `bmm` takes to multiply.)
    shared = rems.num_key_value_groups
    first, last = rems.heads[0] // shared, rems.heads[-1] // shared
    rows = tuple(head - first * shared for head in rems.heads)
    num_values = last + 1 - first
    if len(rows) < num_values * shared:
        padded = weights.new_zeros(weights.shape[0], num_values * shared, weights.shape[2])
        weights = padded.index_copy(1, constant(rows, weights.device), weights)
    if num_values < value.shape[1]:
        value = value.narrow(1, first, num_values)
    B, _, S, D = value.shape
    matrices = weights.expand(B, -1, -1).reshape(B * num_values, shared, S)
    columns = value.to(weights.dtype).reshape(B * num_values, S, D)
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if compiled and value.dtype != weights.dtype:
        # One kernel, which reads V in its dtype; for `bmm` the compiler would write a copy in the weights' dtype.
        sums = (matrices[..., None] * columns[:, None]).sum(2)
    else:
        sums = torch.bmm(matrices, columns)
    return take_heads(sums.view(B, num_values * shared, 1, D), rows, dim=1)
