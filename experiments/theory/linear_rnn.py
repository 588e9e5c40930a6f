r"""A linear RNN is a sum of RSA heads without a softmax half (paper, propositions 1, 2 and 4).

The hidden states of h_t = W_h h_{t−d} + W_x x_t, with h = 0 before the first step, are

    h_t = W_x x_t + Σ_{j≥1} W_hʲ W_x x_{t−jd},        W_hʲ = Σ_k z_kʲ M_k   for j ≥ 1,

where z_k are the nonzero eigenvalues of W_h and M_k = b_k c_kᵀ the projectors on their eigenvectors: b_k is a column
of B, c_kᵀ a row of B⁻¹, in W_h = B J B⁻¹. Each head is therefore a REM and a value matrix:

    z = λ real                  regular head, λ^j          value matrix  M W_x
    z = γ e^{±iθ}, a pair       cos head, γ^j cos jθ       value matrix  2 Re(M) W_x
                                sin head, γ^j sin jθ       value matrix  −2 Im(M) W_x

With r real eigenvalues and s pairs these are r + 2s heads; one more, whose P is the identity, gives W_x x_t. With a
step of d (proposition 4) the REMs are dilated by d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsa_hf.heads import RSAHeads
from rsa_hf.ops import rem_product

__all__ = ["LinearRNNHeads", "init_from_linear_rnn", "linear_rnn", "linear_rnn_to_heads"]

# Relative to the largest entry of W_h: smaller eigenvalues count as 0, and closer ones as equal.
SAME = 1e-10
# With a larger condition number of the eigenvectors the heads would lose more than half of the digits.
WORST_CONDITION = 1e7


def linear_rnn(x: Tensor, W_h: Tensor, W_x: Tensor, dilation: int = 1) -> Tensor:
    """Compute the hidden states step by step: h_t = W_h h_{t−d} + W_x x_t, with h = 0 before the first step.

    Args:
        x: inputs, shape [B, T, m].
        W_h: shape [n, n].
        W_x: shape [n, m].
        dilation: d.

    Returns:
        Shape [B, T, n].
    """
    states = list[Tensor]()
    for t, written in enumerate((x @ W_x.T).unbind(1)):
        states.append(written if t < dilation else written + states[t - dilation] @ W_h.T)
    return torch.stack(states, dim=1)


@dataclass(frozen=True, eq=False)
class LinearRNNHeads:
    """A linear RNN as heads: h = Σ_k P_k x V_kᵀ + x W_xᵀ.

    Attributes:
        kinds: `"regular"`, `"cos"` or `"sin"` of each of the K = r + 2s heads, in that order; the i-th cos and the
            i-th sin head are a pair.
        decay: λ or γ of each head, shape (K,).
        theta: θ in radians of each head, 0 for regular ones, shape (K,).
        dilation: d of all heads.
        value_matrices: V_k, shape [K, n, m].
        identity: W_x, the value matrix of the head whose P is the identity, shape [n, m].
    """

    kinds: tuple[str, ...]
    decay: Tensor
    theta: Tensor
    dilation: int
    value_matrices: Tensor
    identity: Tensor

    def hidden_states(self, x: Tensor) -> Tensor:
        """Compute the hidden states [B, T, n] from the heads alone, in float64, for inputs [B, T, m] of any dtype."""
        x = x.to(self.identity.dtype)
        own = x @ self.identity.T
        if not self.kinds:
            return own
        value = torch.einsum("btm,knm->bktn", x, self.value_matrices)
        return own + rem_product(value, self.kinds, self.decay, self.theta, self.dilation).sum(1)

    def head_counts(self) -> dict[str, int | list[int]]:
        """Keyword arguments of `RSAConfig` for a plan with these heads."""
        regular, pairs = self.kinds.count("regular"), self.kinds.count("cos")
        if self.dilation == 1:
            return {"num_regular": regular, "num_cyclical_pairs": pairs}
        counts: dict[str, int | list[int]] = {
            "num_dilated_regular": regular,
            "num_dilated_cyclical_pairs": pairs,
            "dilation": [self.dilation] * len(self.kinds),
        }
        return counts


def linear_rnn_to_heads(W_h: Tensor, W_x: Tensor, dilation: int = 1) -> LinearRNNHeads:
    """Turn h_t = W_h h_{t−d} + W_x x_t into heads with the same hidden states (paper, propositions 1, 2 and 4).

    Computed in float64. W_h may be singular: directions with eigenvalue 0 are forgotten at once, and only the identity
    head represents them.

    Args:
        W_h: shape [n, n].
        W_x: shape [n, m].
        dilation: d.

    Raises:
        ValueError: W_h is not stable (it has an eigenvalue of modulus ≥ 1, which no REM has), or it has no basis of
            eigenvectors (it is defective, or numerically too close to a defective matrix).
    """
    W_x = W_x.detach().double()
    eigenvalues, projectors = _spectrum(W_h)
    if len(eigenvalues) and float(eigenvalues.abs().max()) >= 1:
        raise ValueError(
            f"W_h has an eigenvalue of modulus {float(eigenvalues.abs().max()):.6g}: REMs need moduli below "
            "1. Scale W_h down, e.g. by its spectral radius."
        )
    real = eigenvalues.imag == 0
    upper = eigenvalues.imag > 0  # one of each pair stands for both
    pairs = int(upper.sum())
    M = projectors[upper]
    matrices = torch.cat([projectors[real].real, 2 * M.real, -2 * M.imag])
    decay = torch.cat([eigenvalues[real].real, *[eigenvalues[upper].abs()] * 2])
    theta = torch.cat([torch.zeros_like(eigenvalues[real].real), *[eigenvalues[upper].angle()] * 2])
    kinds = ("regular",) * int(real.sum()) + ("cos",) * pairs + ("sin",) * pairs
    return LinearRNNHeads(kinds, decay, theta, dilation, matrices @ W_x, W_x)


def _spectrum(W_h: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct nonzero eigenvalues in descending modulus, and their projectors: (K,) and [K, n, n], complex."""
    W_h = W_h.detach().double()
    eigenvalues, B = torch.linalg.eig(W_h)
    condition = float(torch.linalg.cond(B))
    if not condition <= WORST_CONDITION:
        raise ValueError(
            f"W_h has no usable basis of eigenvectors (condition number {condition:.1e}, at most "
            f"{WORST_CONDITION:.0e} is allowed): it is defective, or nearly so, and powers of a Jordan block are not "
            "a sum of REMs. Add a little noise to W_h, or train it further."
        )
    projectors = torch.einsum("ik,kj->kij", B, torch.linalg.inv(B))
    closeness = SAME * float(W_h.abs().max())
    distinct: list[tuple[complex, Tensor]] = []
    for z, M in zip(eigenvalues.tolist(), projectors, strict=True):
        if abs(z) <= closeness:
            continue
        if abs(z.imag) <= closeness:  # rounding splits a double real eigenvalue into such a pair
            z = complex(z.real)
        same = next((i for i, (known, _) in enumerate(distinct) if abs(known - z) <= closeness), None)
        if same is None:
            distinct.append((z, M))
        else:
            distinct[same] = (distinct[same][0], distinct[same][1] + M)
    distinct.sort(key=lambda pair: (-abs(pair[0]), abs(pair[0].imag), pair[0].imag))
    if not distinct:
        return eigenvalues[:0], projectors[:0]
    return eigenvalues.new_tensor([z for z, _ in distinct]), torch.stack([M for _, M in distinct])


@torch.no_grad()
def init_from_linear_rnn(heads: RSAHeads, W_h: Tensor, *, dilated: bool = False) -> None:
    """Initialise the rates of a patched layer from the spectrum of a fitted linear RNN, largest moduli first.

    Real eigenvalues go to regular heads, complex pairs to cyclical ones; heads beyond the spectrum are not changed.

    Args:
        heads: the RSA heads of one layer.
        W_h: shape [n, n], of h_t = W_h h_{t−1} + …; or of h_t = W_h h_{t−d} + … for dilated heads.
        dilated: initialise the dilated heads instead of the undilated ones.

    Raises:
        ValueError: W_h is not stable or has no basis of eigenvectors, or the layer has no such heads.
    """
    plan, scale = heads.plan, heads.plan.parameter_scale
    found = linear_rnn_to_heads(W_h, torch.eye(len(W_h), device=W_h.device))

    def rates_of(kind: str) -> list[int]:
        described = zip(plan.kinds, plan.dilations, plan.rates, strict=True)
        return [rate for of_head, d, rate in described if of_head == kind and (d > 1) == dilated]

    regular, cos, sin = rates_of("regular"), rates_of("cos"), rates_of("sin")
    if not regular + cos + sin:
        raise ValueError(f"this layer has no {'dilated' if dilated else 'undilated'} RSA heads: {heads.extra_repr()}.")
    num_real, num_pairs = found.kinds.count("regular"), found.kinds.count("cos")
    lam, pairs = found.decay[: min(num_real, len(regular))], slice(num_real, num_real + min(num_pairs, len(cos)))
    gamma, theta = found.decay[pairs], found.theta[pairs]
    # The largest tanh or sigmoid below 1 in float32.
    below_one = 1 - torch.finfo(torch.float32).eps
    if heads.eta is not None:
        heads.eta[regular[: len(lam)]] = (torch.atanh(lam.clamp(-below_one, below_one)) / scale).to(heads.eta)
    if heads.nu is not None and heads.theta is not None:
        for of_kind in (cos, sin):
            places = [rate - len(plan.eta) for rate in of_kind[: len(gamma)]]
            heads.nu[places] = (torch.logit(gamma.clamp(max=below_one)) / scale).to(heads.nu)
            heads.theta[places] = (theta / scale).to(heads.theta)
