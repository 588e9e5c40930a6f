"""Memories to compare REMs with: RSA heads with an f(τ) that rsa_hf does not have, computed with a dense P.

* `amplitude`: f(τ) = Re(c z^{τ−1}) (`rsa_hf/rem.py`) with a learned complex c that starts at the paper's.
* `unit lag`: the same with c = 1, or −i for sin heads: the last token has the weight 1, or 0 for sin heads.
* `kernel`: a learned weight for each of the first K lags, initialised from the REM, and 0 beyond: a short convolution;
  for K = 1, a token shift.
* `nothing`: f = 0, so that gates only damp attention.

Amplitudes and kernels have the weights' learning rate; gates and rates learn `parameter_scale` times as fast. Rows are
not padded, and there is no cache.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rsa_hf import RSAHeads
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import rems_and_gate
from rsa_hf.rem import complex_powers, mix, take_heads, weights_of_lags

FORMS = ("amplitude", "unit lag", "kernel", "nothing")


class FormHeads(RSAHeads):
    """RSA heads with one of `FORMS`.

    Args:
        heads: RSA heads of the same layer, undilated and without free lags.
        form: one of `FORMS`.
        lags: K, of a kernel.
    """

    def __init__(self, heads: RSAHeads, form: str, lags: int = 0) -> None:
        super().__init__(heads.spec)
        self.form = form
        rems, _ = rems_and_gate(self.learned, self.spec.layout, 1)
        if form == "kernel":
            start = weights_of_lags(rems, torch.arange(1, lags + 1), torch.float32)
            self.kernel = nn.Parameter(start.detach())
        if form == "amplitude":
            self.amplitude = nn.Parameter(rems.amplitudes().detach().float())
        if form in ("kernel", "nothing"):
            self.eta = self.nu = self.theta = None

    def weights(self, length: int) -> Tensor:
        """f(τ) of each head at the lags 0 … length − 1, [R, length]."""
        if self.form == "kernel":
            f = nn.functional.pad(self.kernel, (1, max(0, length - 1 - self.kernel.shape[1])))
            return f[:, :length]
        rems, _ = rems_and_gate(self.learned, self.spec.layout, 1)
        unit = self.mu.new_tensor([[0, -1] if kind == "sin" else [1, 0] for kind in rems.kinds])
        c = self.amplitude if self.form == "amplitude" else unit
        lags = torch.arange(length, device=self.mu.device)
        real, imaginary = complex_powers(rems, (lags - 1).clamp(min=0), torch.float32)
        return torch.where(lags > 0, c[:, :1] * real - c[:, 1:] * imaginary, 0)

    def forward(self, attention: Tensor, value: Tensor, mask: AttentionMask | None = None, *_: Any) -> Tensor:
        """Mix P V into attention [B, T, H, D], of the last T of S positions; of the mask the direction is read."""
        heads = self.spec.layout.heads
        gate = self.rates()["gate"].expand(len(heads))
        if self.form == "nothing":
            return mix(attention, torch.zeros_like(attention[:, :, list(heads)]).transpose(1, 2), gate, heads)
        T, S = attention.shape[1], value.shape[2]
        past = self.weights(S).flip(1)
        future = torch.zeros_like(past) if mask is None or mask.causal else past.flip(1)
        P = torch.cat([past, future[:, 1:]], dim=1).unfold(1, S, 1).flip(1)[:, S - T :]  # [R, T, S]
        groups = attention.shape[2] // value.shape[1]
        product = P @ take_heads(value, tuple(head // groups for head in heads), dim=1)
        return mix(attention, product, gate, heads)
