"""Memories to compare REMs with: causal RSA heads with an f(τ) that rsa_hf does not have, computed with a dense P.

* `unit lag`: f(τ) = Re(c z^{τ−1}) (`rsa_hf/rem.py`) with c = 1, of sin heads −i: the last token has the weight 1.
* `kernel`: a learned weight for each of the first K lags, from the REM's on, and 0 beyond: a short convolution, for
  K = 1 a token shift.
* `kernel and tail`: the same, and the REM beyond.
* `nothing`: f = 0, so that gates only damp attention.

Kernels learn at the pace of the weights, gates and rates `parameter_scale` times as fast. Rows are not padded, and
there is no cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rsa_hf import RSAHeads
from rsa_hf.rem import Rems, mix, take_heads, weights_of_lags

FORMS = ("unit lag", "kernel", "kernel and tail", "nothing")


class FormHeads(RSAHeads):
    """RSA heads with one of `FORMS`.

    Args:
        heads: RSA heads of the same layer, undilated and without learned amplitudes.
        form: one of `FORMS`.
        lags: K, of a kernel.
    """

    def __init__(self, heads: RSAHeads, form: str, lags: int = 0) -> None:
        super().__init__(heads.spec)
        self.form = form
        if form.startswith("kernel"):
            start = weights_of_lags(self._rems(None), torch.arange(1, lags + 1), torch.float32)
            self.kernel = nn.Parameter(start.detach())
        if form in ("kernel", "nothing"):
            self.eta = self.nu = self.theta = None

    def _rems(self, amplitude: Tensor | None) -> Rems:
        return replace(self.rems_and_gate()[0], amplitude=amplitude)

    def weights(self, length: int) -> Tensor:
        """f(τ) of each head at the lags 0 … length − 1, [R, length]."""
        if self.form == "kernel":
            f = nn.functional.pad(self.kernel, (1, max(0, length - 1 - self.kernel.shape[1])))
            return f[:, :length]
        unit = self.mu.new_tensor([[0, -1] if kind == "sin" else [1, 0] for kind in self.spec.kinds])
        rems = self._rems(unit if self.form == "unit lag" else None)
        f = weights_of_lags(rems, torch.arange(length, device=self.mu.device), torch.float32)
        if self.form == "kernel and tail":
            K = self.kernel.shape[1]
            f = torch.cat([f[:, :1], self.kernel, f[:, K + 1 :]], dim=1)[:, :length]
        return f

    def forward(self, attention: Tensor, value: Tensor, *_: Any) -> Tensor:
        """Mix P V into attention [B, T, H, D], of the last T of S positions."""
        heads, gate = self.spec.heads, self.rates()["gate"].expand(self.spec.num_rsa_heads)
        if self.form == "nothing":
            return mix(attention, torch.zeros_like(attention[:, :, list(heads)]).transpose(1, 2), gate, heads)
        T, S = attention.shape[1], value.shape[2]
        lag = torch.arange(S - T, S, device=value.device)[:, None] - torch.arange(S, device=value.device)
        P = torch.where(lag > 0, self.weights(S)[:, lag.clamp(min=0)], 0)
        groups = attention.shape[2] // value.shape[1]
        product = P @ take_heads(value, tuple(head // groups for head in heads), dim=1)
        return mix(attention, product, gate, heads)
