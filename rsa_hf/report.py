"""What a patched model has learned, layer by layer: gates, rates and half-lives."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.distributed.tensor import DTensor

from rsa_hf.heads import RSAHeads, active_heads
from rsa_hf.utils.text import format_table

__all__ = ["HeadReport", "LayerReport", "RSAReport", "rsa_report"]


@dataclass(frozen=True)
class HeadReport:
    """One RSA head: its REM and its effective values.

    Attributes:
        head: index of the head in its layer.
        kind: `"regular"`, `"cos"` or `"sin"`.
        dilation: d; 1 for a head that is not dilated.
        gate: g = σ(μ).
        decay: λ or γ.
        theta: θ in radians; None for a regular head.
        half_life: number of positions after which |λ|^τ or γ^τ has fallen to one half; inf if it does not fall.
    """

    head: int
    kind: str
    dilation: int
    gate: float
    decay: float
    theta: float | None
    half_life: float


@dataclass(frozen=True)
class LayerReport:
    """The RSA heads of one attention module.

    Attributes:
        module: name of the module in the model.
        heads: its RSA heads, in head order.
    """

    module: str
    heads: tuple[HeadReport, ...]


@dataclass(frozen=True)
class RSAReport:
    """All RSA layers of a model; `print` shows a table.

    Attributes:
        layers: the layers, in module order.
        num_parameters: number of all RSA parameters.
    """

    layers: tuple[LayerReport, ...]
    num_parameters: int

    def to_dict(self) -> dict[str, Any]:
        """As plain lists and numbers, for JSON."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """Gates and rates to log in training, in few numbers; empty without RSA heads.

        `rsa/gate` is the mean over all layers. For each RSA layer in module order, `rsa/gate/layer_NN` and
        `rsa/decay/layer_NN` are the means over its heads of g and of |λ| or γ.
        """
        if not self.layers:
            return {}
        gates = [fmean(head.gate for head in layer.heads) for layer in self.layers]
        decays = [fmean(abs(head.decay) for head in layer.heads) for layer in self.layers]
        values = {"rsa/gate": fmean(gates)}
        values |= {f"rsa/gate/layer_{i:02d}": gate for i, gate in enumerate(gates)}
        values |= {f"rsa/decay/layer_{i:02d}": decay for i, decay in enumerate(decays)}
        return values

    def __str__(self) -> str:
        if not self.layers:
            return "no RSA heads: the model is not patched"
        rows = [("module", "head", "REM", "d", "gate", "decay", "theta", "half-life")]
        for layer in self.layers:
            for h in layer.heads:
                rows.append(
                    (
                        layer.module,
                        str(h.head),
                        h.kind,
                        str(h.dilation),
                        f"{h.gate:.4f}",
                        f"{h.decay:+.4f}",
                        "" if h.theta is None else f"{h.theta:+.4f}",
                        f"{h.half_life:.1f}",
                    )
                )
        return f"{format_table(rows)}\n{len(self.layers)} layers, {self.num_parameters} RSA parameters"


@torch.no_grad()
def rsa_report(model: nn.Module) -> RSAReport:
    """Read the gates and rates of a model.

    Args:
        model: any module; one without RSA heads gives an empty report. Under PEFT the heads of the active adapter are
            read, and offloaded parameters are loaded. Under FSDP2 every process has to call this.

    Returns:
        The report: `print(report)` for a table, `report.to_dict()` for JSON.
    """
    layers, parameters = [], 0
    for name, heads in active_heads(model):
        with align_module_device(heads):
            layers.append(LayerReport(name.removesuffix(".rsa"), tuple(_head_reports(heads))))
        parameters += sum(parameter.numel() for parameter in heads.parameters())
    return RSAReport(tuple(layers), parameters)


def _head_reports(heads: RSAHeads) -> list[HeadReport]:
    rates = {name: _whole(value).double().cpu() for name, value in heads.rates().items()}
    decay, theta = heads.per_head(rates)
    gate = rates["gate"].expand(heads.plan.num_rsa_heads)
    reports = []
    described = zip(heads.plan.heads, heads.plan.kinds, heads.plan.dilations, strict=True)
    for i, (head, kind, d) in enumerate(described):
        rate = float(decay[i])
        half_life = _half_life(abs(rate), d)
        angle = None if kind == "regular" else float(theta[i])
        reports.append(HeadReport(head, kind, d, float(gate[i]), rate, angle, half_life))
    return reports


def _whole(value: torch.Tensor) -> torch.Tensor:
    # Under FSDP2 every process has a shard.
    return value.full_tensor() if isinstance(value, DTensor) else value


def _half_life(modulus: float, dilation: int) -> float:
    if modulus in (0, 1):
        return 0.0 if modulus == 0 else math.inf
    return dilation * math.log(0.5) / math.log(modulus)
