r"""P V in plain PyTorch: any mask, any device, differentiable any number of times.

Without an arbitrary mask, P V is computed in chunks of C steps, in linear time and memory. With z the rate of a head
and c its amplitude (see `rem.py`), row i of chunk n is

    y_i = Σ_j f(i − j) v_j + Re(c z^i h_n)        s_n = Σ_j z^{C−1−j} v_j        h_n = Σ_{m<n} z^{C(n−1−m)} s_m

h is the product of the states s with a REM of rate z^C and amplitude 1, so it is computed in chunks as well. A complex
number is stored as two rows of a real matrix. An unmasked REM has states from both sides.

In a sliding window of w steps, a query sees the chunks 1 … q − 1 before its own as a whole, with q = ⌊w / C⌋, so h has
a window too. It sees part of the chunks q and q + 1, which are multiplied by f, as its own chunk is. Nothing is
subtracted, so nothing cancels, however slow the decay.

Free lags add a term for each step k ≤ K: V shifted by k steps, times the free weight minus the paper's.

A head dilated by d is its base head on d interleaved sub-sequences. Axes: batch B, heads h of one dilation, residues
d, chunks N, rows (steps C, or 2C for states), channels D.

All other masks, and a few queries after cached keys, go through the explicit P, at quadratic cost.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rsa_hf.ops.decode import decode
from rsa_hf.ops.mask import AttentionMask, boolean_mask, lags
from rsa_hf.ops.read_mask import read_traced
from rsa_hf.rem import Rems, complex_powers, constant, kept_constants, mix, take_heads, weights_of_lags, working_dtype

CHUNK = 32  # steps


def product_in_pytorch(
    value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """The output of a `Problem` (see there) in ordinary operations, from REMs and gates of shape (R,).

    No value of a tensor is looked at, so it works in graphs and in the transforms of `torch.func`.
    """
    is_read = mask.unread_mask is None or mask.query_position is not None
    if mask.is_step and is_read:
        product = decode(value, rems, mask)
    else:
        # Cast here, so that the gradients of heads that share a value head are summed before they are rounded.
        value = value.to(working_dtype(value))
        is_dense = mask.visible is not None or not is_read or mask.has_few_queries or value.numel() == 0
        product = (_dense if is_dense else _chunked)(value, rems, mask)
    return product if attention is None or gate is None else mix(attention, product, gate, rems.heads)


def _keys(value: Tensor, rems: Rems) -> Tensor:
    """V of every head, [B, H, S, D]."""
    return take_heads(value, tuple(head // rems.num_key_value_groups for head in rems.heads), dim=1)


def _dense(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    mask = read_traced(mask)
    tau = lags(mask, value.device)
    visible = boolean_mask(mask, tau)
    if visible.shape[1] > 1:  # one mask per head, plain heads included
        visible = take_heads(visible, rems.heads, dim=1)
    tau = tau.clamp(min=0) if mask.causal else tau.abs()
    # All of P is picked from one table of weights by lag. Not `[:, tau]`: its gradient cannot be mapped over a batch.
    table = weights_of_lags(rems, torch.arange(mask.query_length + mask.key_length, device=value.device), value.dtype)
    P = torch.where(visible, table.index_select(1, tau.flatten()).unflatten(1, tau.shape), 0)
    # Keys that no query sees may hold anything, and 0 · NaN would be NaN.
    is_seen = visible.any(dim=-2)[..., None]
    return P @ torch.where(is_seen, _keys(value, rems), 0)


def _chunked(value: Tensor, rems: Rems, mask: AttentionMask) -> Tensor:
    seen = mask.seen_length  # without the slots of a static cache after the last query
    value = value[:, :, :seen]
    if mask.key_mask is not None:
        value = torch.where(mask.key_mask[:, None, :seen, None], value, 0)  # not · 0: padding may hold NaN
    products = []
    for d in sorted(set(rems.dilation)):
        places = tuple(h for h, dilation in enumerate(rems.dilation) if dilation == d)
        decay, theta = (take_heads(rate, places, dim=0) for rate in (rems.decay, rems.theta))
        free_lags = None if rems.free_lags is None else take_heads(rems.free_lags, places, dim=0)
        kinds, heads = tuple(rems.kinds[h] for h in places), tuple(rems.heads[h] for h in places)
        one = (1,) * len(places)  # dilation, in the steps of a sub-sequence
        of_d = Rems(kinds, decay, theta, one, rems.num_key_value_groups, heads, free_lags)
        ids = None
        if mask.documents is not None:
            ids = (_interleaved(mask.documents[:, None, :seen, None], d, -1)[..., 0],) * 2
        window = None if mask.sliding_window is None else (mask.sliding_window - 1) // d + 1
        x = _interleaved(_keys(value, of_d), d, 0)[..., None, :]
        sides = (1,) if mask.causal else (1, -1)
        product = _product(x, of_d, 1, sides, window, ids)
        if free_lags is not None:
            product = product + _free_part(x, of_d, sides, window, ids)
        products.append(product.squeeze(4).transpose(2, 3).flatten(2, 3)[:, :, :seen])
    product = products[0]
    if len(products) > 1:
        order = sorted(range(len(rems.heads)), key=rems.dilation.__getitem__)
        back = constant(tuple(map(order.index, range(len(order)))), value.device)
        product = torch.cat(products, 1).index_select(1, back)
    return product[:, :, mask.query_offset : mask.query_offset + mask.query_length]


def _free_part(
    x: Tensor, rems: Rems, sides: tuple[int, ...], window: int | None, ids: tuple[Tensor, Tensor] | None
) -> Tensor:
    """What free lags add to the `_product` of values; see there for the arguments."""
    assert rems.free_lags is not None
    steps = torch.arange(1, rems.free_lags.shape[1] + 1, device=x.device)
    added = rems.free_lags.to(x.dtype) - weights_of_lags(replace(rems, free_lags=None), steps, x.dtype)
    parts = []
    for k in range(1, min(len(steps), x.shape[3] - 1, (window or x.shape[3]) - 1) + 1):
        for side in sides:
            shifted = _shift(x, side * k, 0)
            if ids is not None:
                same = ids[0] == _shift(ids[1], side * k, -2)
                shifted = torch.where(same[..., None, None], shifted, 0)
            parts.append(added[:, k - 1, None, None, None, None] * shifted)
    return sum(parts, added.sum() * torch.zeros_like(x))  # so that they get the gradient 0 from a text of one token


def _interleaved(x: Tensor, d: int, fill: int) -> Tensor:
    """[B, h, S, D] as d sub-sequences, filled up at the end: [B, h, d, steps, D]."""
    missing = -x.shape[2] % d
    x = F.pad(x, (0, 0, 0, missing), value=fill) if missing else x
    return x.reshape(*x.shape[:2], -1, d, x.shape[3]).transpose(2, 3)


def _product(
    x: Tensor, rems: Rems, stride: int, sides: tuple[int, ...], window: int | None, ids: tuple[Tensor, Tensor] | None
) -> Tensor:
    """P V in chunks, in the shape of x, which holds values, or states with a real and an imaginary part.

    Args:
        x: the sequence, [B, h, d, steps, parts, D].
        rems: the heads, without dilation.
        stride: a state k steps away has the weight z^{(k − 1) · stride}, a value the real part of c z^{k − 1}.
        sides: 1: steps before a query, −1: steps after it.
        window: number of steps that a query sees on a side, itself included; None: all.
        ids: documents of queries and of keys, [B, 1, d, steps] each; a query sees only its own. None: there is one.
    """
    steps, parts = x.shape[3:5]
    C = min(steps, CHUNK)
    x = _in_chunks(x, C, 0).flatten(4, 5).contiguous()  # [B, h, d, N, C · parts, D]
    N = x.shape[3]
    if ids is not None:
        queries, keys = _in_chunks(ids[0], C, -1), _in_chunks(ids[1], C, -2)  # [B, 1, d, N, C]

    # Distances of the chunks that are multiplied by weights, and the number of chunks seen as a whole, by states.
    distances: tuple[int, ...] = (0,)
    whole = N - 1
    if window is not None and window < steps:
        q = window // C
        distances += tuple(side * k for k in (q, q + 1) if 0 < k < N for side in sides)
        whole = min(max(q - 1, 0), N - 1)
    exponents, block, read, write = _places(C, distances, sides, window, x.device)
    real, imaginary = complex_powers(rems, exponents * stride, x.dtype)
    # z^k as matrices, [h, parts of a row, parts of a column, k]; the last one is 0.
    to_state = torch.stack([torch.stack([real, -imaginary], 1), torch.stack([imaginary, real], 1)], 1)
    to_state = F.pad(to_state, (0, 1))
    to_query = to_state
    if parts == 1:
        c = rems.amplitudes().to(x.dtype)[:, :, None, None, None]
        to_query = c[:, 0] * to_state[:, :1] - c[:, 1] * to_state[:, 1:]  # Re(c z^k h)

    weights = _matrix(to_query[:, :, :parts], block)
    if ids is not None:
        seen = torch.cat([_shift(keys, distance, -2) for distance in distances], 4)
        weights = _where_same(queries, seen, weights)
    matrices, columns = [weights], [_shift(x, distance, 0) for distance in distances]  # for a single product
    for side in sides if whole else ():
        writing, reading = (_matrix(*pair) for pair in ((to_state[:, :, :parts], write[side]), (to_query, read[side])))
        of_states = None
        if ids is not None:
            # A state belongs to the document of the last step that writes into it.
            ends = keys[..., -1] if side > 0 else keys[..., 0]
            before = _shift(ends, side, -2)
            writing = _where_same(ends[..., None], keys, writing)
            reading = _where_same(queries, before[..., None], reading)
            of_states = (before, ends)
        matrices.append(reading)
        seen_chunks = None if whole == N - 1 else whole + 1
        columns.append(_product(writing @ x, rems, stride * C, (side,), seen_chunks, of_states))
    output = torch.cat(matrices, -1) @ torch.cat(columns, 4)
    return output.reshape(*x.shape[:3], N * C, parts, -1)[:, :, :, :steps]


def _matrix(powers: Tensor, places: Tensor) -> Tensor:
    """Powers [h, out, in, K], taken at places [rows, columns]: [h, 1, 1, rows · out, columns · in]."""
    entries = powers.index_select(3, places.flatten()).reshape(*powers.shape[:3], *places.shape)
    return entries.permute(0, 3, 1, 4, 2).flatten(3, 4).flatten(1, 2)[:, None, None]


def _where_same(rows: Tensor, columns: Tensor, matrix: Tensor) -> Tensor:
    """The matrix, set to 0 where row and column have different ids, [B, 1, d, N, rows] and [B, 1, d, N, columns]."""
    same = rows[..., :, None] == columns[..., None, :]
    for axis in (4, 5):  # an id may stand for two parts
        same = same.repeat_interleave(matrix.shape[axis - 1] // same.shape[axis], axis)
    return torch.where(same, matrix, 0)


@kept_constants(64)
def _places(
    C: int, distances: tuple[int, ...], sides: tuple[int, ...], window: int | None, device: torch.device
) -> tuple[Tensor, Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """Exponents of z, [K], and their places in the matrices of a chunk; the place K stands for the entry 0.

    These are the weights, [C, C · distances], and per side those that read a state, [C, 1], or write it, [1, C].
    """
    rows = range(C)
    shown = {side * lag: lag - 1 for lag in range(1, C if window is None else window) for side in sides}
    weights = [[shown.get(distance * C + i - j) for distance in distances for j in rows] for i in rows]
    exponents = sorted({*rows, *(k for row in weights for k in row if k is not None)})
    places = {k: place for place, k in enumerate(exponents)}

    def on_device(numbers: list[list[int | None]]) -> Tensor:
        taken = [[len(exponents) if k is None else places[k] for k in row] for row in numbers]
        return torch.tensor(taken, device=device)

    read = {side: on_device([[k] for k in rows[::side]]) for side in sides}
    write = {side: on_device([list(rows[::-side])]) for side in sides}
    return torch.tensor(exponents, device=device), on_device(weights), read, write


def _in_chunks(x: Tensor, C: int, fill: int) -> Tensor:
    """[B, h, d, steps, …] as [B, h, d, N, C, …], filled up at the end."""
    missing = -x.shape[3] % C
    x = F.pad(x, (0, 0) * (x.dim() - 4) + (0, missing), value=fill) if missing else x
    return x.reshape(*x.shape[:3], -1, C, *x.shape[4:])


def _shift(x: Tensor, chunks: int, fill: int) -> Tensor:
    """Shift x along axis 3: in each place what is `chunks` places before it, or after it if that is negative."""
    N = x.shape[3]
    count = max(-N, min(chunks, N))
    return F.pad(x, (0, 0) * (x.dim() - 4) + (count, -count), value=fill) if chunks else x
