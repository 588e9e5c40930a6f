r"""The recurrence encoding matrices: the paper's mathematics, to be read next to the paper.

Notation: H heads, T queries, S keys; t indexes queries, s keys; queries are positions
`query_offset … query_offset + T - 1` of the key axis, and τ = (query_offset + t) − s.

A REM is the Toeplitz matrix P[t, s] = f(τ) with f(0) = 0 (paper, eqs. 2–4 and section 3):

    regular          f(τ) = λ^τ              λ = tanh η
    cyclical, cos    f(τ) = γ^τ cos(τθ)      γ = sigmoid ν
    cyclical, sin    f(τ) = γ^τ sin(τθ)
    dilated by d     f(τ) = f_base(τ / d) where d divides τ, else 0

Masked (causal) REMs have f(τ) = 0 for τ ≤ 0; unmasked ones are P + Pᵀ, that is f(|τ|) with a zero diagonal.

An RSA head mixes P V into softmax attention with a gate g = sigmoid μ (eq. 4):

    RSA(X) = (1 − g) · softmax(QKᵀ/√D) V + g · P V

A head is described by its kind, its `decay` (λ or γ), its angle `theta` (ignored for regular heads) and its
`dilation`. `ops/` computes P V without P, in linear time.

In all cases f(τ) = Re(c z^{k−1}) at the steps k = τ/d = 1, 2, …, with a complex rate z = λ or γ e^{iθ} and an
amplitude c = z (for sin heads, c = −i z). As an extension, the weights of the first K steps may be free: f(τ) is then
a separate number for each k = 1 … K.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

KINDS = ("regular", "cos", "sin")
FREE_LAGS = range(1, 9)  # allowed numbers of free lags, K

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Rems:
    """The REMs of H heads. Each field but `num_key_value_groups` has one entry per head."""

    kinds: tuple[str, ...]  # "regular", "cos" or "sin"
    decay: Tensor  # λ or γ, shape (H,): |z|, or z itself where it is real
    theta: Tensor  # angle of z in radians, shape (H,); 0 for regular heads
    dilation: tuple[int, ...]
    num_key_value_groups: int  # heads per value head; head h of the layer reads value head h // num_key_value_groups
    heads: tuple[int, ...]  # index of each head in the layer, ascending; the layer's other heads are plain
    free_lags: Tensor | None = None  # f(kd) for the steps k = 1 … K, shape (H, K), instead of the paper's

    def amplitudes(self) -> Tensor:
        """Real and imaginary part of c, shape (H, 2)."""
        sin = constant(tuple(kind == "sin" for kind in self.kinds), self.decay.device, torch.bool)
        real, imaginary = self.decay * torch.cos(self.theta), self.decay * torch.sin(self.theta)
        return torch.stack([torch.where(sin, imaginary, real), torch.where(sin, -real, imaginary)], dim=1)


def decay_rates(eta: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
    """λ = tanh η, in (−1, 1), and γ = sigmoid ν, in (0, 1) (paper, section 3), elementwise."""
    return torch.tanh(eta), torch.sigmoid(nu)


def lag_weights(
    kind: str, decay: float, theta: float | None, dilation: int, free_lags: Sequence[float] | None, lags: Tensor
) -> Tensor:
    """`weights_of_lags` in float64 for one head, given by plain numbers; θ is not read for a regular head."""

    def tensor(numbers: Any) -> Tensor:
        return torch.tensor([numbers], dtype=torch.float64, device="cpu")

    rates = tensor(decay), tensor(0.0 if kind == "regular" else theta)
    rems = Rems((kind,), *rates, (dilation,), 1, (0,), tensor(free_lags) if free_lags else None)
    return weights_of_lags(rems, lags, torch.float64)[0]


def rem_matrix(
    kinds: str | Sequence[str],
    decay: float | Sequence[float] | Tensor,
    theta: float | Sequence[float] | Tensor = 0.0,
    dilation: int | Sequence[int] = 1,
    *,
    query_length: int,
    key_length: int | None = None,
    query_offset: int | None = None,
    causal: bool = True,
    free_lags: Tensor | None = None,
) -> Tensor:
    """The explicit P of every head, for inspection; quadratic in memory.

    Args:
        kinds: the kind of each of the H heads (`"regular"`, `"cos"`, `"sin"`), or one for all.
        decay: λ (regular) or γ (cyclical) of each head, shape (H,), or one for all.
        theta: θ of each cyclical head in radians, shape (H,), or one for all.
        dilation: d of each head, or one for all.
        query_length: T.
        key_length: S; default T.
        query_offset: position of the first query on the key axis; default S − T: the queries come last.
        causal: masked (True) or unmasked (False) REMs.
        free_lags: f(kd) of each head for the steps k = 1 … K ≤ 8, shape (H, K), in place of the paper's.

    Returns:
        P, shape [H, T, S], on the device and in the dtype of `decay`; for numbers, as `torch.tensor` would make them.

    Raises:
        ValueError: an unknown kind, a dilation below 1, or head descriptions or free lags whose lengths do not match.
    """
    kinds, decay, theta, dilation = head_tensors(kinds, decay, theta, dilation)
    require_free_lags(free_lags, len(kinds))
    key_length = query_length if key_length is None else key_length
    query_offset = key_length - query_length if query_offset is None else query_offset
    t = torch.arange(query_length, device=decay.device)
    s = torch.arange(key_length, device=decay.device)
    lags = (query_offset + t)[:, None] - s[None, :]
    if not causal:
        lags = lags.abs()
    rems = Rems(kinds, decay, theta, dilation, 1, tuple(range(len(kinds))), free_lags)
    return weights_of_lags(rems, lags, decay.dtype)


def require_free_lags(free_lags: Tensor | None, num_heads: int) -> None:
    """Raise a ValueError if free lags do not have the shape (H, K), with K in `FREE_LAGS`."""
    if free_lags is not None and free_lags.shape not in [(num_heads, K) for K in FREE_LAGS]:
        allowed = f"[{num_heads}, K] with K from {FREE_LAGS[0]} to {FREE_LAGS[-1]}"
        raise ValueError(f"free_lags has shape {tuple(free_lags.shape)}: {allowed} is needed.")


def mix(attention: Tensor, product: Tensor, gate: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Equation 4: (1 − g) · attention + g · P V for the RSA heads; plain heads stay as they are.

    `attention` is [B, T, H', D] with H' ≥ H, `product` is P V of the H RSA heads, [B, H, T, D], `gate` is g, (H,), and
    `heads` are their ascending indices. The result has the shape and dtype of `attention`.
    """
    softmax = take_heads(attention, heads, dim=2).to(product.dtype)
    g = gate[:, None].to(product.dtype)
    mixed = (1 - g) * softmax + g * product.transpose(1, 2)
    return put_heads(attention, mixed.to(attention.dtype), heads)


def head_tensors(
    kinds: str | Sequence[str],
    decay: float | Sequence[float] | Tensor,
    theta: float | Sequence[float] | Tensor,
    dilation: int | Sequence[int],
    device: torch.device | None = None,
    num_heads: int | None = None,
) -> tuple[tuple[str, ...], Tensor, Tensor, tuple[int, ...]]:
    """Bring a description of H heads to one form: kinds and dilations of length H, decay and theta of shape (H,).

    θ is 0 for regular heads. A single value stands for all heads; H is `num_heads`, or the longest length. With a
    device, decay and theta are moved there. Numbers become a decay of the widest dtype there, and theta has the dtype
    of decay.

    Raises:
        ValueError: an unknown kind, a dilation that is no whole number ≥ 1, or descriptions of different lengths.
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    dilation = (dilation,) if isinstance(dilation, int) else tuple(dilation)
    if not isinstance(decay, Tensor):
        decay = torch.tensor(decay, dtype=None if device is None else widest_dtype(device), device=device)
    rates = decay.to(device=device).reshape(-1)
    rates = rates if rates.is_floating_point() else rates.to(torch.get_default_dtype())
    angles = torch.as_tensor(theta, dtype=rates.dtype, device=rates.device).reshape(-1)
    given = {"kinds": len(kinds), "decay": len(rates), "theta": len(angles), "dilation": len(dilation)}
    H = max(given.values()) if num_heads is None else num_heads
    if any(n not in (1, H) for n in given.values()):
        raise ValueError(f"kinds, decay, theta, dilation: one entry each, or one for each of {H} heads; got {given}.")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kinds={kind!r}: choose from {', '.join(KINDS)}.")
    for d in dilation:
        if d < 1 or d != int(d):
            raise ValueError(f"dilation={d}: a whole number ≥ 1 is needed.")
    kinds = kinds * H if len(kinds) == 1 else kinds
    dilation = tuple(map(int, dilation * H if len(dilation) == 1 else dilation))
    turns = constant(tuple(kind != "regular" for kind in kinds), rates.device, torch.bool)
    return kinds, rates.expand(H), torch.where(turns, angles, 0), dilation


# --- RSA heads among the heads of a layer ---------------------------------------------------------------------------


def take_heads(layer: Tensor, heads: tuple[int, ...], dim: int) -> Tensor:
    """Some heads of a tensor that has one entry per head along `dim`: a view if they are neighbours, else a copy."""
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        return layer.narrow(dim, heads[0], len(heads))
    return layer.index_select(dim, constant(heads, layer.device))


def put_heads(layer: Tensor, some: Tensor, heads: tuple[int, ...]) -> Tensor:
    """`layer`, [B, T, H', D], with the given heads (ascending) replaced by those in `some`, [B, T, H, D]."""
    parts, end, taken = [], 0, 0
    # Given heads alternate with runs of other heads; the empty run at the end is for given heads that come last.
    for others in [*other_heads(heads, layer.shape[2]), slice(layer.shape[2], None)]:
        count = others.start - end
        parts += [some.narrow(2, taken, count), layer[:, :, others]]
        end, taken = others.stop, taken + count
    parts = [part for part in parts if part.shape[2]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def other_heads(heads: Sequence[int], num_heads: int) -> list[slice]:
    """The heads of a layer of `num_heads` that are not in `heads` (ascending), as runs of neighbours."""
    edges = [-1, *heads, num_heads]
    return [slice(a + 1, b) for a, b in itertools.pairwise(edges) if b > a + 1]


# --- powers of the rates, for the paths that compute P V ------------------------------------------------------------


def working_dtype(value: Tensor) -> torch.dtype:
    """float64 for float64 values, else float32: decay powers and sums lose too much in half precision."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def widest_dtype(device: torch.device) -> torch.dtype:
    """The dtype of rates: float64, or float32 on devices without it. float32 is too coarse near ±1."""
    return torch.float32 if device.type == "mps" else torch.float64


def complex_powers(rems: Rems, exponents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Re z^k and Im z^k of every head at whole exponents k ≥ 0, [K] or [H, K]: [H, K] each.

    Computed in float64 (float32 on devices without it), and differentiable any number of times.
    """
    wide = widest_dtype(exponents.device)
    k = exponents.to(wide)
    decay, theta = (rate.to(wide)[:, None] for rate in (rems.decay, rems.theta))
    # A decay of 0 is replaced by a tiny one, 10⁻⁶² in float64: the derivatives of 0^k contain 0 · 0^−1, which is NaN.
    modulus = torch.where(decay == 0, decay + torch.finfo(wide).tiny ** 0.2, decay) ** k
    # Long decays end in subnormal numbers, which processors multiply far more slowly: use 0 instead.
    limits = torch.finfo(dtype)
    modulus = torch.where((modulus.abs() < limits.tiny / limits.eps) & (k > 1), 0, modulus)
    return (modulus * torch.cos(theta * k)).to(dtype), (modulus * torch.sin(theta * k)).to(dtype)


def weights_of_lags(rems: Rems, lags: Tensor, dtype: torch.dtype) -> Tensor:
    """f(τ) of every causal head, with its dilation (paper, eqs. 2 and 3), at whole lags τ of any shape: [H, …].

    0 where τ ≤ 0 or d does not divide τ.
    """
    tau = lags.flatten()
    if max(rems.dilation) == 1:
        steps, reached = tau, tau > 0
    else:
        dilation = constant(rems.dilation, lags.device)[:, None]
        steps, reached = tau // dilation, (tau > 0) & (tau % dilation == 0)
    # Elsewhere the power is taken at 0 and dropped: at a negative lag it could be infinite.
    real, imaginary = complex_powers(rems, torch.where(reached, steps - 1, 0), dtype)
    amplitude = rems.amplitudes().to(dtype)
    weights = torch.where(reached, amplitude[:, :1] * real - amplitude[:, 1:] * imaginary, 0)
    if rems.free_lags is not None:
        places = (steps.clamp(1, rems.free_lags.shape[1]) - 1).expand_as(weights)
        is_free = reached & (steps <= rems.free_lags.shape[1])
        weights = torch.where(is_free, rems.free_lags.to(dtype).gather(1, places), weights)
    return weights.reshape(len(weights), *lags.shape)


def is_recorded() -> bool:
    """Whether a compiler or a dispatch mode (FakeTensorMode, `make_fx`, …) records operations instead of values."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether a transform of `torch.func`, a batched backward pass or forward-mode differentiation is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def kept_constants(count: int) -> Callable[[Function], Function]:
    """Cache the tensors that a function makes from plain arguments, device and dtype included: the last `count`.

    Tensors that belong to a graph, a dispatch mode or a transform of `torch.func` are not cached.
    """

    def decorate(make: Function) -> Function:
        made = torch.inference_mode(False)(make)  # the next caller may need them for a backward pass
        kept = functools.lru_cache(maxsize=count)(made)

        @functools.wraps(make)
        def constants(*args: Any) -> Any:
            is_own = is_recorded() or torch._C._functorch.peek_interpreter_stack() is not None
            return (made if is_own else kept)(*args)

        return cast(Function, constants)

    return decorate


@kept_constants(256)  # because a copy to a GPU waits for the GPU
def constant(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """A tensor of known numbers on a device, [N]."""
    return torch.tensor(numbers, dtype=dtype, device=device)
