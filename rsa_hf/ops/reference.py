r"""P V twice, to be read next to the paper: by its definition, and step by step.

Nothing here is fast, and nothing here shares code with the paths that it checks. The tests compare values and
gradients of `rem_product` with both.

Notation: batch B, heads H, queries T, keys S, head size D; τ = position of the query − position of the key. A head has
the complex rate z = λ (regular) or z = γ e^{iθ} (cos, sin). With step k = τ / d, for a dilation d that divides τ ≥ 1,

    f(τ) = λ^k,  γ^k cos(kθ)  or  γ^k sin(kθ)      (paper, eqs. 2 and 3)

This is the real part of z^k, or for a sin head the imaginary part. All other f(τ) are 0, including f(0).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_rem_product(
    value: Tensor,
    kinds: Sequence[str],
    decay: Tensor,
    theta: Tensor,
    dilation: Sequence[int],
    *,
    query_length: int | None = None,
    query_offset: int | None = None,
    causal: bool = True,
    num_key_value_groups: int = 1,
    key_mask: Tensor | None = None,
    documents: Tensor | None = None,
    sliding_window: int | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """P V by its definition, with P written out; arguments and result as in `rem_product`, one entry per head."""
    S = value.shape[2]
    T = S if query_length is None else query_length
    start = S - T if query_offset is None else query_offset
    t = torch.arange(start, start + T, device=value.device)[:, None]  # [T, 1]
    s = torch.arange(S, device=value.device)[None]  # [1, S]
    tau = t - s if causal else (t - s).abs()  # [T, S]; unmasked: P + Pᵀ

    heads = []
    for kind, rate, angle, d in zip(kinds, decay, theta, dilation, strict=True):
        nonzero = (tau >= 1) & (tau % d == 0)
        k = torch.where(nonzero, tau // d, 1)
        turn = {"regular": torch.ones_like(k), "cos": torch.cos(k * angle), "sin": torch.sin(k * angle)}[kind]
        heads.append(torch.where(nonzero, rate**k * turn, 0))
    P = torch.stack(heads).to(value.dtype)[None]  # [1, H, T, S]

    sees = ((t >= s) | (not causal))[None, None]  # [1, 1, T, S]
    if key_mask is not None:
        sees = sees & key_mask[:, None, None, :]
    if documents is not None:
        run = F.pad(documents.diff() != 0, (1, 0)).cumsum(1)  # [B, S]
        sees = sees & (run[:, None, start : start + T, None] == run[:, None, None, :])
    if sliding_window is not None:
        sees = sees & ((t - s).abs() < sliding_window)
    if visible is not None:
        sees = sees & visible
    P = torch.where(sees, P, 0)

    V = value.repeat_interleave(num_key_value_groups, dim=1)[:, : len(kinds)]  # [B, H, S, D]
    V = torch.where(sees.any(dim=2)[..., None], V, 0)  # keys that no query sees may hold NaN
    return P @ V  # [B, H, T, D]


def recurrent_rem_product(
    value: Tensor,
    kinds: Sequence[str],
    decay: Tensor,
    theta: Tensor,
    dilation: Sequence[int],
    *,
    query_length: int | None = None,
    query_offset: int | None = None,
    causal: bool = True,
    num_key_value_groups: int = 1,
    key_mask: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """P V as the recurrent network that it encodes, one step at a time: h_t = z (h_{t−d} + v_{t−d}).

    Row t of P V is the real part of h_t, or for a sin head its imaginary part. Arguments and result as in
    `rem_product`; a recurrent state cannot express a window or an arbitrary mask.
    """
    B, _, S, _ = value.shape
    T = S if query_length is None else query_length
    start = S - T if query_offset is None else query_offset
    V = value.repeat_interleave(num_key_value_groups, dim=1)[:, : len(kinds)]  # [B, H, S, D]
    if key_mask is not None:
        V = torch.where(key_mask[:, None, :, None], V, 0)
    run = value.new_zeros(B, S) if documents is None else F.pad(documents.diff() != 0, (1, 0)).cumsum(1).expand(B, -1)

    def in_time(V: Tensor, run: Tensor) -> Tensor:
        heads = []
        for h, (kind, d) in enumerate(zip(kinds, dilation, strict=True)):
            angle = torch.zeros_like(theta[h]) if kind == "regular" else theta[h]
            z = torch.complex(decay[h] * torch.cos(angle), decay[h] * torch.sin(angle))
            states = [torch.zeros_like(V[:, h, 0]) * z] * min(d, S)  # h_0 … h_{d−1}, [B, D] each
            for t in range(d, S):
                same = (run[:, t] == run[:, t - d])[:, None]  # a document starts from nothing
                states.append(torch.where(same, z * (states[t - d] + V[:, h, t - d]), 0))
            state = torch.stack(states, dim=1)  # [B, S, D]
            heads.append(state.imag if kind == "sin" else state.real)
        return torch.stack(heads, dim=1).to(V.dtype)

    output = in_time(V, run)
    if not causal:
        output = output + in_time(V.flip(2), run.flip(1)).flip(2)
    return output[:, :, start : start + T]
