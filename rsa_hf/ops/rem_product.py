"""`rem_product`: the public function for P V. It checks its arguments and brings them to one form."""

from collections.abc import Sequence

from torch import Tensor

from rsa_hf.ops.autograd import solve
from rsa_hf.ops.mask import AttentionMask, document_index
from rsa_hf.ops.problem import from_rems
from rsa_hf.rem import Rems, head_tensors, require_free_lags


def rem_product(
    value: Tensor,
    kinds: str | Sequence[str],
    decay: float | Sequence[float] | Tensor,
    theta: float | Sequence[float] | Tensor = 0.0,
    dilation: int | Sequence[int] = 1,
    *,
    query_length: int | None = None,
    query_offset: int | None = None,
    causal: bool = True,
    num_key_value_groups: int = 1,
    key_mask: Tensor | None = None,
    documents: Tensor | None = None,
    sliding_window: int | None = None,
    visible: Tensor | None = None,
    free_lags: Tensor | None = None,
) -> Tensor:
    """P V for every head, the recurrent half of paper eq. 4.

    Time and memory are linear in the length unless `visible` is given.

    Args:
        value: V, [B, Hv, S, D], any floating dtype. Head h reads value head h // num_key_value_groups.
        kinds: the kind of each of the H = Hv · num_key_value_groups heads (`"regular"`, `"cos"`, `"sin"`), or one for
            all.
        decay: λ (regular) or γ (cyclical) of each head, shape (H,), or one for all.
        theta: θ of each cyclical head in radians, shape (H,), or one for all.
        dilation: d of each head, or one for all.
        query_length: T; default S.
        query_offset: position of the first query on the key axis; default S − T: the queries come last.
        causal: masked (True) or unmasked (False) REMs.
        num_key_value_groups: number of heads per value head (grouped-query attention).
        key_mask: [B or 1, S], False for keys that contribute nothing (padding).
        documents: document numbers of packed rows, [B or 1, S]: a run of equal numbers is a document, and no query
            sees another document.
        sliding_window: number of positions that a query sees backwards, itself included, and with unmasked REMs as
            many forwards.
        visible: [B or 1, H or 1, T, S], False where query t does not see key s, for any other mask. Exact, but
            costs O(T·S).
        free_lags: f(kd) of each head for the steps k = 1 … K ≤ 8, shape (H, K), in place of the paper's.

    Returns:
        P V, [B, H, T, D], in the dtype of the computation: float64 for float64 values, else float32.

    Raises:
        ValueError: an unknown kind, a dilation that is no whole number ≥ 1, lengths or heads that do not fit `value`.
    """
    if value.dim() != 4:
        raise ValueError(f"value has shape {tuple(value.shape)}: [B, H, S, D] is needed.")
    if num_key_value_groups < 1:
        raise ValueError(f"num_key_value_groups={num_key_value_groups}: a whole number ≥ 1 is needed.")
    B, Hv, S, _ = value.shape
    H = Hv * num_key_value_groups
    kinds, decay, theta, dilation = head_tensors(kinds, decay, theta, dilation, value.device, H)
    T = S if query_length is None else query_length
    offset = S - T if query_offset is None else query_offset
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: a whole number ≥ 1 is needed, since a query sees itself.")
    for name, mask in {"key_mask": key_mask, "documents": documents}.items():
        if mask is not None and (mask.dim() != 2 or mask.shape[0] not in (1, B) or mask.shape[1] != S):
            raise ValueError(f"{name} has shape {tuple(mask.shape)}: [{B} or 1, {S}] is needed.")
    if visible is not None and (
        visible.dim() != 4
        or visible.shape[0] not in (1, B)
        or visible.shape[1] not in (1, H)
        or visible.shape[2:] != (T, S)
    ):
        raise ValueError(f"visible has shape {tuple(visible.shape)}: [{B} or 1, {H} or 1, {T}, {S}] is needed.")
    require_free_lags(free_lags, H)
    free = None if free_lags is None else free_lags.to(decay)
    rems = Rems(kinds, decay, theta, dilation, num_key_value_groups, tuple(range(H)), free)
    packed = None if documents is None else document_index(documents)
    # Copies, because the backward pass needs the masks as they are now.
    key_mask = None if key_mask is None else key_mask != 0
    visible = None if visible is None else visible.clone()
    seen = AttentionMask(T, S, offset, causal, key_mask, packed, sliding_window, visible)
    return solve(from_rems(value, rems, seen))
