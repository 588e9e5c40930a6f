"""The plan: which attention heads become RSA heads, with which REM, and where their parameters start.

`RSAConfig` is what a user writes; `LayerConfig` is the same for one layer whose number of heads is known.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from rsa_hf.utils.brief import brief

__all__ = ["LayerConfig", "RSAConfig"]

Count = int | tuple[int, ...] | None
_T = TypeVar("_T")

# More than any model has, or any text asks for; keeps a damaged plan from asking for all memory.
MAX_HEADS = 4096
MAX_DILATION = 65_536
MAX_LAYERS = 4096

# No gate or optimiser needs more; further out, what is stored leaves the range of float32.
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
MAX_START = 1e6

_COUNT_FIELDS = ("num_regular", "num_cyclical_pairs", "num_dilated_regular", "num_dilated_cyclical_pairs")


@dataclass(frozen=True)
class LayerConfig:
    """The RSA heads of one attention layer (the paper's k1 … k6 and d, section 3).

    RSA heads come first, in the order regular, cos, sin, dilated regular, dilated cos, dilated sin; the plain
    heads follow. The i-th cos head and the i-th sin head of a kind are a pair.

    Attributes:
        num_regular: k1.
        num_cyclical_pairs: k2 = k3.
        num_dilated_regular: k4.
        num_dilated_cyclical_pairs: k5 = k6.
        dilation: one factor per dilated head, in head order, `k4 + k5 + k6` of them.
        gate_init: where μ starts; −inf is a shut gate.
        nu_init: the two ends between which the pairs' ν start.
        theta_init: the same of θ, in radians.
        gate_per_head: one μ per RSA head instead of one per layer.
        tie_pairs: the cos and the sin head of a pair share (ν, θ).
        parameter_scale: parameters are stored as value / parameter_scale.
        causal: direction of the REM; None: as the attention module says.
    """

    num_regular: int
    num_cyclical_pairs: int
    num_dilated_regular: int
    num_dilated_cyclical_pairs: int
    dilation: tuple[int, ...]
    gate_init: float
    nu_init: tuple[float, float]
    theta_init: tuple[float, float]
    gate_per_head: bool
    tie_pairs: bool
    parameter_scale: float
    causal: bool | None

    @property
    def num_rsa_heads(self) -> int:
        """Number of RSA heads, R = k1 + … + k6."""
        return (
            self.num_regular
            + 2 * self.num_cyclical_pairs
            + self.num_dilated_regular
            + 2 * self.num_dilated_cyclical_pairs
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The base REM of each RSA head, `"regular"`, `"cos"` or `"sin"`, in head order."""
        return (
            ("regular",) * self.num_regular
            + ("cos",) * self.num_cyclical_pairs
            + ("sin",) * self.num_cyclical_pairs
            + ("regular",) * self.num_dilated_regular
            + ("cos",) * self.num_dilated_cyclical_pairs
            + ("sin",) * self.num_dilated_cyclical_pairs
        )

    @property
    def dilations(self) -> tuple[int, ...]:
        """The dilating factor of each RSA head, 1 for those that are not dilated, in head order."""
        return (1,) * (self.num_rsa_heads - len(self.dilation)) + self.dilation

    @property
    def num_eta(self) -> int:
        """Number of η: one per regular head."""
        return self.num_regular + self.num_dilated_regular

    @property
    def num_nu(self) -> int:
        """Number of ν, and of θ: one per pair, or one per cyclical head where pairs are not tied."""
        pairs = self.num_cyclical_pairs + self.num_dilated_cyclical_pairs
        return pairs if self.tie_pairs else 2 * pairs


@dataclass(frozen=True)
class RSAConfig:
    """What `patch_model` puts on a model.

    With no counts given, every layer gets a mix of RSA and plain heads: half of its heads (at least one) become RSA
    heads, as cyclical pairs, an odd one regular. The published language models take half the heads and cyclical pairs
    too (paper, section 4.3).

    Each count is one number for all layers, or one per patched layer.

    The defaults are meant for pretrained models; a model that is trained from scratch learns faster from
    `RSAConfig.from_scratch`. They are chosen from `rsa-hf reproduce fine-tune` (RESULTS.md), and from its quick size,
    a byte-level Llama of 0.1M parameters: with them fine-tuning gains beyond chance on little and on much data. Gates
    from one half or more gain no more beyond chance, and cost before training; gates from −6 gain hardly anything; no
    other pace, nor θ spread, gains more beyond chance. SmolLM2-135M loses a little with them where it is trained for
    no more than 50 steps, in which its gates hardly move.

    Args:
        num_regular: number of regular REM heads, k1 (λ = tanh η).
        num_cyclical_pairs: number of cos/sin pairs, k2 = k3 (γ = sigmoid ν, θ).
        num_dilated_regular: number of dilated regular heads, k4.
        num_dilated_cyclical_pairs: number of dilated cos/sin pairs, k5 = k6.
        dilation: the dilating factor d ≥ 1: one for all dilated heads, or one per dilated head in head order
            (dilated regular, dilated cos, dilated sin), e.g. `[3, 6, 9, 12]`; for plans given per layer also one
            such list per layer.
        gate_init: where μ starts, the gate being σ(μ); or `(low, high)`, spread evenly over the patched layers.
            −3 keeps a pretrained model nearly as it was; `float("-inf")` shuts the gate, and outputs are then
            bitwise those of the unpatched model.
        nu_init: where ν starts, γ being sigmoid ν: one number for all pairs, or `(low, high)`, between which the pairs
            of a layer stand evenly, in the middles of equal parts. The default is the paper's (section 3).
        theta_init: where θ starts, in radians, given in the same way. The default is the paper's.
        gate_per_head: one μ per RSA head (an extension) instead of one per layer (the paper).
        tie_pairs: the cos and the sin head of a pair share (ν, θ), as in the paper.
        layers: indices of the self-attention layers to patch, counted over all self-attention modules of the
            model in module order (for an encoder-decoder: the encoder's first). None: every layer. What is given per
            layer is for them in ascending order.
        causal: True for masked REMs, False for unmasked ones, or one of them per patched layer; None: as the module
            it is put on.
        parameter_scale: RSA parameters are stored as value / parameter_scale, so that an optimiser of Adam's kind
            moves the values parameter_scale times as fast as the weights. At the weights' own pace gates and rates
            hardly move (results/parameter_scale.md). 1 stores the plain values.

    Raises:
        TypeError: a field has a type that does not fit.
        ValueError: a field has a value that is not allowed; the message names it.
    """

    num_regular: Count = None
    num_cyclical_pairs: Count = None
    num_dilated_regular: Count = None
    num_dilated_cyclical_pairs: Count = None
    dilation: int | tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    gate_init: float | tuple[float, float] = -3.0
    nu_init: float | tuple[float, float] = (1.0, 2.0)
    theta_init: float | tuple[float, float] = math.pi / 4
    gate_per_head: bool = False
    tie_pairs: bool = True
    layers: tuple[int, ...] | None = None
    causal: bool | tuple[bool, ...] | None = None
    parameter_scale: float = 20.0

    def __post_init__(self) -> None:
        for name in _COUNT_FIELDS:
            object.__setattr__(self, name, _check_count(name, getattr(self, name)))
        object.__setattr__(self, "dilation", _check_dilation(self.dilation))
        object.__setattr__(self, "gate_init", _check_gate_init(self.gate_init))
        for name in ("nu_init", "theta_init"):
            object.__setattr__(self, name, _check_start(name, getattr(self, name)))
        object.__setattr__(self, "causal", _check_causal(self.causal))
        object.__setattr__(self, "layers", _check_layers(self.layers, self._fields_per_layer()))
        for name in ("gate_per_head", "tie_pairs"):
            _check_bool(name, getattr(self, name))
        scale = _check_number("parameter_scale", self.parameter_scale)
        if not MIN_SCALE <= scale <= MAX_SCALE:
            raise ValueError(
                f"parameter_scale={scale}: a positive finite number is needed, from {MIN_SCALE:g} to {MAX_SCALE:g}; "
                "1 stores plain values."
            )
        object.__setattr__(self, "parameter_scale", scale)

    def _fields_per_layer(self) -> list[str]:
        """Names of the fields that have an entry for each patched layer."""
        lists = [name for name in (*_COUNT_FIELDS, "causal") if isinstance(getattr(self, name), tuple)]
        nested = isinstance(self.dilation, tuple) and any(isinstance(entry, tuple) for entry in self.dilation)
        return [*lists, "dilation"] if nested else lists

    @classmethod
    def from_scratch(cls, num_heads: int) -> RSAConfig:
        """The plan for a model that is trained from random weights.

        All heads are RSA heads in cyclical pairs, an odd one regular, with gates from σ(1), ν from 0 and θ spread over
        (0, π). There is nothing that open gates could harm, a memory of few tokens is what can be learned first, and
        pairs that start alike are slow to part; results/start.md, made by `scripts/measure_start.py`, compares. On a
        pretrained model, which attends to nearest neighbours already, this start has gained less than the paper's
        (RESULTS.md, fine-tune).

        Args:
            num_heads: attention heads of each layer, H.

        Raises:
            TypeError: it is no whole number.
            ValueError: it is below 1.
        """
        if not _is_int(num_heads):
            raise TypeError(f"num_heads={brief(num_heads)}: a whole number ≥ 1 is needed.")
        if num_heads < 1:
            raise ValueError(f"num_heads={num_heads}: a whole number ≥ 1 is needed.")
        pairs = num_heads // 2
        return cls(
            num_regular=num_heads - 2 * pairs,
            num_cyclical_pairs=pairs,
            gate_init=1.0,
            nu_init=0.0,
            theta_init=(0.0, math.pi),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RSAConfig:
        """Build a config from a mapping, as read from JSON or YAML.

        Raises:
            TypeError: `values` is no mapping, or a field has the wrong type.
            ValueError: an unknown key, or a value that is not allowed.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"an RSA plan is a mapping of fields to values, got {type(values).__name__}: {brief(values)}"
            )
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key)[:100], known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown RSA setting {brief(key)}.{hint} Allowed: {', '.join(known)}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain lists, numbers and booleans; `from_dict` reads them back."""
        return {field.name: _as_lists(getattr(self, field.name)) for field in fields(self)}

    def layer_plans(self, num_heads: Sequence[int | None]) -> list[LayerConfig]:
        """The plan of each patched layer.

        Args:
            num_heads: number of attention heads H of each patched layer; None where it is not known, as when a
                checkpoint is loaded, whose plan is written out.

        Raises:
            ValueError: more RSA heads than heads, a list of the wrong length, dilated heads without dilation, or
                dilation without dilated heads.
        """
        n = len(num_heads)
        if all(getattr(self, name) is None for name in _COUNT_FIELDS):
            if self.dilation is not None:
                raise self._no_dilated_heads("the default plan has none")
            if None in num_heads:
                raise ValueError("a plan without counts needs the number of heads of every layer; give the counts.")
            counts = [_default_counts(heads) for heads in num_heads if heads is not None]
        else:
            columns = [_per_layer(name, getattr(self, name) or 0, n) for name in _COUNT_FIELDS]
            counts = list(zip(*columns, strict=True))
            if isinstance(self.dilation, int) and not any(k4 or k5 for _, _, k4, k5 in counts):
                raise self._no_dilated_heads("this plan has none")
        gates = self._layer_gates(n)
        directions = (None,) * n if self.causal is None else _per_layer("causal", self.causal, n)
        plans = []
        for layer, (heads, (k1, k2, k4, k5), gate, causal) in enumerate(
            zip(num_heads, counts, gates, directions, strict=True)
        ):
            used = k1 + 2 * k2 + k4 + 2 * k5
            spelled = (
                f"num_regular={k1}, num_cyclical_pairs={k2}, num_dilated_regular={k4}, num_dilated_cyclical_pairs={k5}"
            )
            limit = MAX_HEADS if heads is None else heads
            if used > limit:
                raise ValueError(
                    f"layer {layer} has {'at most ' if heads is None else ''}{limit} attention heads, but the plan "
                    f"asks for {used} RSA heads ({spelled}; a pair is two heads). Use at most {limit}."
                )
            if used == 0:
                raise ValueError(
                    f"the plan gives layer {layer} no RSA head ({spelled}). Ask for at least one, or leave the layer "
                    "out with layers=[…]."
                )
            plans.append(
                LayerConfig(
                    num_regular=k1,
                    num_cyclical_pairs=k2,
                    num_dilated_regular=k4,
                    num_dilated_cyclical_pairs=k5,
                    dilation=self._layer_dilation(layer, n, k4 + 2 * k5),
                    gate_init=gate,
                    nu_init=_ends(self.nu_init),
                    theta_init=_ends(self.theta_init),
                    gate_per_head=self.gate_per_head,
                    tie_pairs=self.tie_pairs,
                    parameter_scale=self.parameter_scale,
                    causal=causal,
                )
            )
        return plans

    def resolved(self, num_heads: Sequence[int]) -> RSAConfig:
        """The same config with the default plan written out, so that a checkpoint does not depend on defaults.

        Args:
            num_heads: number of attention heads H of each patched layer.
        """
        plans = self.layer_plans(num_heads)
        columns = {name: tuple(getattr(plan, name) for plan in plans) for name in _COUNT_FIELDS}
        uniform: dict[str, Any] = {name: c[0] if len(set(c)) == 1 else c for name, c in columns.items()}
        return replace(self, **uniform)

    def _no_dilated_heads(self, why: str) -> ValueError:
        return ValueError(
            f"dilation={brief(self.dilation)} is given but no dilated heads are: {why}; set num_dilated_regular or "
            "num_dilated_cyclical_pairs too."
        )

    def _layer_gates(self, n: int) -> list[float]:
        if isinstance(self.gate_init, tuple):
            low, high = self.gate_init
            return [low + (high - low) * (i / (n - 1) if n > 1 else 0.5) for i in range(n)]
        return [self.gate_init] * n

    def _layer_dilation(self, layer: int, n: int, dilated_heads: int) -> tuple[int, ...]:
        value: Any = self.dilation
        if isinstance(value, tuple) and value and isinstance(value[0], tuple):
            if len(value) != n:
                raise ValueError(f"dilation has {len(value)} lists, one per layer, but {n} layers are patched.")
            value = value[layer]
        if value is None:
            if dilated_heads:
                raise ValueError(
                    f"layer {layer} has {dilated_heads} dilated heads but dilation is not given: set dilation to one "
                    "factor d ≥ 1, or to one per dilated head."
                )
            return ()
        if isinstance(value, int):
            return (value,) * dilated_heads
        if len(value) != dilated_heads:
            raise ValueError(
                f"dilation={brief(value)} has {len(value)} entries, but layer {layer} has {dilated_heads} dilated "
                "heads (a dilated pair is two). Give one factor for all, or one per dilated head in the order dilated "
                "regular, dilated cos, dilated sin."
            )
        return tuple(value)


def _default_counts(heads: int) -> tuple[int, int, int, int]:
    rsa = max(1, heads // 2)
    pairs = rsa // 2
    return rsa - 2 * pairs, pairs, 0, 0


def _as_lists(value: Any) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, tuple) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={brief(value)}: True or False is needed, got {type(value).__name__}.")


def _check_causal(value: object) -> bool | tuple[bool, ...] | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"causal={brief(value)}: True, False, one of them per patched layer, or None is needed.")
    if not value:
        raise ValueError("causal=[]: True, False, one of them per patched layer, or None is needed.")
    for entry in value:
        _check_bool("causal", entry)
    return tuple(value)


def _check_number(name: str, value: object) -> float:
    # JSON and YAML files and command lines have no literal for infinity that all of them read.
    if isinstance(value, str) and value.strip().lower() in ("-inf", "inf", "+inf"):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={brief(value)}: a number is needed, got {type(value).__name__}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}={brief(value)}: the number is too large.") from None


def _check_count(name: str, value: object) -> Count:
    allowed = "a whole number ≥ 0, or one per patched layer"
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"{name}=[]: {allowed} is needed.")
        for entry in value:
            if not _is_int(entry):
                raise TypeError(f"{name}={brief(value)}: {allowed} is needed, got {brief(entry)}.")
            if entry < 0:
                raise ValueError(f"{name}={brief(value)}: {allowed} is needed, got {brief(entry)}.")
        return tuple(value)
    if not _is_int(value):
        raise TypeError(f"{name}={brief(value)}: {allowed} is needed.")
    assert isinstance(value, int)
    if value < 0:
        raise ValueError(f"{name}={brief(value)}: {allowed} is needed.")
    return value


def _check_dilation(value: object, depth: int = 0) -> Any:
    allowed = "a whole number ≥ 1, one per dilated head, or one such list per layer"
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        if depth == 2:
            raise TypeError(f"dilation={brief(value)}: {allowed} is needed; this list is nested too deep.")
        entries = tuple(_check_dilation(entry, depth + 1) for entry in value)
        if any(entry is None for entry in entries) or len({isinstance(e, tuple) for e in entries}) > 1:
            raise TypeError(f"dilation={brief(value)}: {allowed} is needed.")
        return entries
    if not _is_int(value):
        raise TypeError(f"dilation={brief(value)}: {allowed} is needed.")
    assert isinstance(value, int)
    if value < 1:
        raise ValueError(f"dilation={brief(value)}: {allowed} is needed; 1 is no dilation.")
    if value > MAX_DILATION:
        raise ValueError(f"dilation={brief(value)}: at most {MAX_DILATION} is allowed.")
    return value


def _check_gate_init(value: object) -> float | tuple[float, float]:
    if isinstance(value, (list, tuple)):
        return _check_start("gate_init", value)
    number = _check_number("gate_init", value)
    if math.isnan(number):
        raise ValueError("gate_init=nan: a number is needed, such as -3.0, or float('-inf') for a shut gate.")
    return number if math.isinf(number) else _check_start("gate_init", number, ", or float('-inf') for a shut gate")


def _check_start(name: str, value: object, otherwise: str = "") -> float | tuple[float, float]:
    """One finite number, or the two ends of a range."""
    if isinstance(value, (list, tuple)):
        if len(value) != 2:
            raise ValueError(f"{name}={brief(value)}: one number, or the two ends (low, high), are needed.")
        low, high = (_check_number(name, v) for v in value)
        if not (abs(low) <= MAX_START and abs(high) <= MAX_START):
            raise ValueError(
                f"{name}={brief(value)}: the two ends (low, high) must be finite, from {-MAX_START:g} to "
                f"{MAX_START:g}."
            )
        return low, high
    number = _check_number(name, value)
    if not abs(number) <= MAX_START:
        raise ValueError(f"{name}={number}: a number from {-MAX_START:g} to {MAX_START:g} is needed{otherwise}.")
    return number


def _ends(value: float | tuple[float, float]) -> tuple[float, float]:
    return value if isinstance(value, tuple) else (value, value)


def _check_layers(value: object, fields_per_layer: Sequence[str]) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple, range)):
        raise TypeError(f"layers={brief(value)}: a list of layer indices is needed, or None for every layer.")
    if len(value) > MAX_LAYERS:
        raise ValueError(f"layers has {len(value)} indices; at most {MAX_LAYERS} are allowed.")
    layers = tuple(value)
    for entry in layers:
        if not _is_int(entry):
            raise TypeError(f"layers={brief(layers)}: layer indices are whole numbers, got {brief(entry)}.")
        if entry < 0:
            raise ValueError(f"layers={brief(layers)}: layer indices count from 0, got {brief(entry)}.")
    if len(set(layers)) != len(layers):
        raise ValueError(f"layers={brief(layers)}: an index stands more than once.")
    if not layers:
        raise ValueError("layers=[]: name at least one layer, or None for every layer.")
    ordered = tuple(sorted(layers))
    if fields_per_layer and layers != ordered:
        # Nobody could tell whether the entries are in the order of `layers` or in the model's.
        raise ValueError(
            f"layers={brief(layers)}: with {', '.join(fields_per_layer)} given per layer, indices must ascend, as the "
            "entries are for the layers in the model's order."
        )
    return ordered


def _per_layer(name: str, value: int | tuple[_T, ...], n: int) -> tuple[Any, ...]:
    if isinstance(value, int):
        return (value,) * n
    if len(value) != n:
        raise ValueError(f"{name}={brief(value)} has {len(value)} entries, but {n} layers are patched.")
    return value
