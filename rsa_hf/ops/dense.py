"""P V through the explicit P: for masks of any shape, a few queries after cached keys, ONNX, and further derivatives.

Quadratic in the length. With f of `rem.py` and the mask of `boolean_mask`, P[t, s] = f(τ) where query t sees key s,
else 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask, boolean_mask, lags, read_traced
from rsa_hf.ops.types import Gradients, SoftmaxBranch
from rsa_hf.rem import Rems, constant, is_kind, mix, take_heads, weights_of_lags, widest_dtype, working_dtype

__all__ = ["dense_backward", "dense_forward", "differentiable_product", "keys_of_heads", "to_value_heads"]


def differentiable_product(value: Tensor, rems: Rems, mask: AttentionMask, softmax: SoftmaxBranch | None) -> Tensor:
    """`apply_rems` in ordinary PyTorch operations, without looking at the values of a tensor.

    PyTorch differentiates these itself, in every mode and any number of times, and maps them over a batch. Time and
    memory are quadratic in the length.
    """
    (P,), keys, _ = _operands(value, rems, read_traced(mask), table=_differentiable_table(value, rems))
    product = P @ keys
    return product if softmax is None else mix(softmax.attention, product, softmax.gate, rems.heads)


def _differentiable_table(value: Tensor, rems: Rems) -> Tensor:
    """f(τ) by lag from 0 to S − 1, [1, H, S]."""
    S, device = value.shape[2], value.device
    decay, theta = (rate.to(widest_dtype(device))[:, None] for rate in (rems.decay, rems.theta))
    # Products have derivatives of every order; those of `pow` end in NaN at a rate of 0.
    powers = torch.ones_like(decay)
    while powers.shape[1] < S:
        powers, decay = torch.cat([powers, powers * decay], dim=1), decay * decay
    tau, dilation = torch.arange(S, device=device), constant(rems.dilation, device)[:, None]
    steps, reached = tau // dilation, (tau > 0) & (tau % dilation == 0)
    angle = steps * torch.where(is_kind(rems, ("regular",)), 0, theta)
    turn = torch.where(is_kind(rems, ("sin",)), torch.sin(angle), torch.cos(angle))
    return torch.where(reached, powers.gather(1, steps) * turn, 0).to(working_dtype(value))[None]


def dense_forward(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    """P V, [B, H, T, D], from values [B, Hv, S, D]."""
    (P,), keys, _ = _operands(value, rems, mask)
    return P @ keys


def dense_backward(grad: Tensor, value: Tensor, rems: Rems, mask: AttentionMask) -> Gradients:
    """The gradients of `dense_forward`, from the gradient of its output, [B, H, T, D]."""
    (P, *derivatives), keys, is_seen = _operands(value, rems, mask, derivatives=True)
    grad = grad.to(P.dtype)
    dkeys = torch.where(is_seen, P.mT @ grad, 0)
    drates = [((derivative @ keys) * grad).sum((0, 2, 3)).to(rems.decay.dtype) for derivative in derivatives]
    drates.append(torch.zeros_like(rems.decay))  # θ, if no head is cyclical
    return Gradients(to_value_heads(dkeys, value, rems), *drates[:2])


def _operands(
    value: Tensor, rems: Rems, mask: AttentionMask, derivatives: bool = False, table: Tensor | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """P, with derivatives also ∂P/∂decay and, where a head is cyclical, ∂P/∂θ; V of every head; and which keys count.

    The matrices have no graph, unless the weights by lag are given as a table that has one.

    Returns:
        A list of [1 or B, H, T, S]; [B, H, S, D]; and [B or 1, H or 1, S, 1], True for keys that some query sees.
    """
    device, dtype = rems.decay.device, working_dtype(value)
    tau = lags(mask, device)
    visible = boolean_mask(mask, tau)
    if visible.shape[1] > 1:  # a part for each head, plain ones too
        visible = take_heads(visible, rems.heads, dim=1)
    tau = tau.clamp(min=0) if mask.causal else tau.abs()
    # All of P is picked from one table of weights by lag; f(0) = 0.
    if table is None:
        lengths = mask.query_length + mask.key_length
        table = weights_of_lags(rems, torch.arange(lengths, device=device), dtype, derivatives)
    # Not `weights[:, tau]`: its gradient cannot be mapped over a batch.
    picked = [weights.index_select(1, tau.flatten()).unflatten(1, tau.shape) for weights in table]
    matrices = [torch.where(visible, weights[None], 0) for weights in picked]
    is_seen = visible.any(dim=-2)[..., None]
    # Keys that nobody sees may hold anything, and 0 · NaN would be NaN.
    return matrices, torch.where(is_seen, keys_of_heads(value, rems), 0), is_seen


def keys_of_heads(value: Tensor, rems: Rems) -> Tensor:
    """V of every head in the working dtype: [B, H, S, D]."""
    return take_heads(value, _value_heads(rems), dim=1).to(working_dtype(value))


def to_value_heads(dkeys: Tensor, value: Tensor, rems: Rems) -> Tensor:
    """The gradient of V, [B, Hv, S, D], from the gradient of every head's V."""
    # Summed before rounding: a term may overflow half precision although the sum does not.
    dvalue = torch.zeros_like(value, dtype=dkeys.dtype)
    return dvalue.index_add_(1, constant(_value_heads(rems), value.device), dkeys).to(value.dtype)


def _value_heads(rems: Rems) -> tuple[int, ...]:
    """The value head that each head reads."""
    return tuple(head // rems.heads_per_value for head in rems.heads)
