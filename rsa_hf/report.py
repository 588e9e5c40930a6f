"""What a patched model has learned, layer by layer: gates, rates and half-lives."""

import math
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.distributed.tensor import DTensor

from rsa_hf.children import active_heads
from rsa_hf.layer import RSAHeads
from rsa_hf.rem import KINDS
from rsa_hf.utils.text import format_table


@dataclass(frozen=True)
class HeadReport:
    """One RSA head: its REM, its effective values, and where they started."""

    head: int  # its index in the layer
    kind: str  # "regular", "cos" or "sin"
    dilation: int  # d; 1 for a head that is not dilated
    gate: float  # g = σ(μ)
    decay: float  # λ or γ
    theta: float | None  # in radians; None for a regular head
    half_life: float  # positions after which |λ|^(τ/d) or γ^(τ/d) has fallen to one half; inf: it does not fall
    gate_start: float
    decay_start: float
    theta_start: float | None
    free_lags: tuple[float, ...] = ()  # the weights of the first steps, where they are free


@dataclass(frozen=True)
class LayerReport:
    """The RSA heads of one attention module, by its name in the model, in head order."""

    module: str
    heads: tuple[HeadReport, ...]


@dataclass(frozen=True)
class RSAReport:
    """All RSA layers of a model, in module order, and the number of their parameters; `print` shows a table."""

    layers: tuple[LayerReport, ...]
    num_parameters: int

    def to_dict(self) -> dict[str, Any]:
        """As plain lists and numbers, for JSON."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """A few numbers on gates and rates, to log in training; empty without RSA heads.

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
        free = any(head.free_lags for layer in self.layers for head in layer.heads)
        rows = [["module", "head", "REM", "d", "gate", "start", "decay", "start", "theta", "start", "half-life"]]
        rows[0] += ["free lags"] * free
        for layer in self.layers:
            for h in layer.heads:
                gates = [f"{gate:.4f}" for gate in (h.gate, h.gate_start)]
                rates = (h.decay, h.decay_start, h.theta, h.theta_start)
                signed = ["" if rate is None else f"{rate:+.4f}" for rate in rates]
                place = (layer.module, str(h.head), h.kind, str(h.dilation))
                lags = " ".join(f"{weight:+.4f}" for weight in h.free_lags)
                rows.append([*place, *gates, *signed, f"{h.half_life:.1f}", *[lags] * free])
        return f"{format_table(rows)}\n{len(self.layers)} layers, {self.num_parameters} RSA parameters"


@torch.no_grad()
def rsa_report(model: nn.Module) -> RSAReport:
    """Read the gates and rates of a model.

    Args:
        model: any module; one without RSA heads gives an empty report. Under PEFT the heads of the active adapter are
            read, and offloaded parameters are loaded. Under FSDP2 every process must call this.

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
    with torch.device("cpu"):
        start = _effective(RSAHeads(heads.spec))
    K, numbers = heads.spec.layout.num_free_lags, [] if heads.free_lags is None else _numbers(heads.free_lags)
    reports = []
    for row, now, before in zip(heads.spec.layout.rows, _effective(heads), start, strict=True):
        lags = tuple(numbers[K * row.lags_index : K * (row.lags_index + 1)])
        half_life = _half_life(abs(now[1]), row.dilation)
        reports.append(HeadReport(row.head, KINDS[row.kind], row.dilation, *now, half_life, *before, lags))
    return reports


def _effective(heads: RSAHeads) -> list[tuple[float, float, float | None]]:
    """Gate, decay and θ of each head."""
    rates = {name: _numbers(value) for name, value in heads.rates().items()}
    found: list[tuple[float, float, float | None]] = []
    for row in heads.spec.layout.rows:
        is_regular, gate = KINDS[row.kind] == "regular", rates["gate"][row.gate_index]
        decay = rates["lam" if is_regular else "gamma"][row.rate_index]
        found.append((gate, decay, None if is_regular else rates["theta"][row.rate_index]))
    return found


def _numbers(values: torch.Tensor) -> list[float]:
    # Under FSDP2 every process has a shard.
    found: list[float] = (values.full_tensor() if isinstance(values, DTensor) else values).tolist()
    return found


def _half_life(modulus: float, dilation: int) -> float:
    if modulus in (0, 1):
        return 0.0 if modulus == 0 else math.inf
    return dilation * math.log(0.5) / math.log(modulus)
