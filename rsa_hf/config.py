"""`RSAConfig`: which attention heads become RSA heads, with which REM, and where their parameters start.

`RSAConfig` is what a user writes, for a whole model. `LayerConfig` is what it means for one layer.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from rsa_hf.utils.brief import brief

__all__ = ["LayerConfig", "RSAConfig"]

Count = int | tuple[int, ...] | None
_T = TypeVar("_T")

# Larger than in any model. They keep a damaged config from asking for all memory.
MAX_HEADS = 4096
MAX_DILATION = 65_536
MAX_LAYERS = 4096

# Beyond these the stored values leave the range of float32.
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
        gate_init: initial μ; −inf is a shut gate.
        nu_init: the two ends between which the initial ν of the pairs are spread.
        theta_init: the same for θ, in radians.
        gate_per_head: one μ per RSA head instead of one per layer.
        tie_pairs: the cos and the sin head of a pair share (ν, θ).
        parameter_scale: parameters are stored as value / parameter_scale.
        causal: direction of the REM; None: that of the attention module.
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
    """The RSA heads that `patch_model` puts on a model.

    Without counts, half of the heads of every layer (at least one) become RSA heads: cyclical pairs, and one regular
    head if their number is odd. The published language models use half the heads and cyclical pairs too (paper,
    section 4.3). Each count is one number for all layers, or one per patched layer.

    The defaults are meant for pretrained models; a model trained from scratch learns faster with
    `RSAConfig.from_scratch`. They were chosen with `rsa-hf reproduce fine-tune` (RESULTS.md), also at its quick size,
    a byte-level Llama of 0.1M parameters: with them fine-tuning gains beyond chance on little and on much data. Gates
    that start at one half or more gain no more, and cost before training; gates from −6 gain hardly anything; no
    other `parameter_scale` or spread of θ gains more. SmolLM2-135M loses a little if it is trained for at most 50
    steps, in which its gates hardly move.

    Args:
        num_regular: number of regular REM heads, k1 (λ = tanh η).
        num_cyclical_pairs: number of cos/sin pairs, k2 = k3 (γ = sigmoid ν, θ).
        num_dilated_regular: number of dilated regular heads, k4.
        num_dilated_cyclical_pairs: number of dilated cos/sin pairs, k5 = k6.
        dilation: the dilating factor d ≥ 1: one for all dilated heads, or one per dilated head in head order
            (dilated regular, dilated cos, dilated sin), e.g. `[3, 6, 9, 12]`; for plans given per layer also one
            such list per layer.
        gate_init: initial μ, where the gate is σ(μ); or `(low, high)`, spread evenly over the patched layers. −3
            keeps a pretrained model nearly as it was; `float("-inf")` shuts the gate, and outputs are then bitwise
            those of the unpatched model.
        nu_init: initial ν, where γ is sigmoid ν: one number for all pairs, or `(low, high)`; the pairs of a layer
            then start in the middles of equal parts of that range. The default is the paper's (section 3).
        theta_init: initial θ in radians, given in the same way. The default is the paper's.
        gate_per_head: one μ per RSA head (an extension) instead of one per layer (the paper).
        tie_pairs: the cos and the sin head of a pair share (ν, θ), as in the paper.
        layers: indices of the self-attention layers to patch, counted over all self-attention modules of the
            model in module order (for an encoder-decoder: the encoder's first). None: every layer. Fields given per
            layer are for these layers in ascending order.
        causal: True for masked REMs, False for unmasked ones, or one of them per patched layer; None: the direction
            of the attention module.
        parameter_scale: RSA parameters are stored as value / parameter_scale, so that Adam and its relatives move
            the values parameter_scale times as fast as the weights. At the learning rate of the weights gates and
            rates hardly move (results/parameter_scale.md). 1 stores the plain values.

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
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        per_layer = self._fields_per_layer()
        if per_layer and self.layers is not None and list(self.layers) != sorted(self.layers):
            # Nobody could tell whether the entries are in the order of `layers` or in the model's.
            raise ValueError(
                f"layers={brief(self.layers)}: with {', '.join(per_layer)} given per layer, indices must ascend, "
                "because the entries are for the layers in the model's order."
            )
        object.__setattr__(self, "layers", None if self.layers is None else tuple(sorted(self.layers)))

    def _fields_per_layer(self) -> list[str]:
        """Names of the fields that have an entry for each patched layer."""
        lists = [name for name in (*_COUNT_FIELDS, "causal") if isinstance(getattr(self, name), tuple)]
        nested = isinstance(self.dilation, tuple) and any(isinstance(entry, tuple) for entry in self.dilation)
        return [*lists, "dilation"] if nested else lists

    @classmethod
    def from_scratch(cls, num_heads: int) -> RSAConfig:
        """The config for a model that is trained from random weights.

        All heads are RSA heads in cyclical pairs, an odd one regular. Gates start at σ(1), as there is nothing that
        open gates could harm; ν at 0, a memory of few tokens, which can be learned first; θ is spread over (0, π), as
        pairs that start alike are slow to differ (results/start.md, made by `scripts/measure_start.py`). On a
        pretrained model, which attends to nearest neighbours already, this start gained less than the paper's
        (RESULTS.md, fine-tune).

        Args:
            num_heads: attention heads of each layer, H.

        Raises:
            TypeError: it is no whole number.
            ValueError: it is below 1.
        """
        _check_integer("num_heads", num_heads, 1, math.inf, "a whole number ≥ 1")
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
        """The config of each patched layer.

        Args:
            num_heads: number of attention heads H of each patched layer; None where it is not known: a checkpoint
                has its counts written out.

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


def _per_layer(name: str, value: int | tuple[_T, ...], n: int) -> tuple[Any, ...]:
    if isinstance(value, int):
        return (value,) * n
    if len(value) != n:
        raise ValueError(f"{name}={brief(value)} has {len(value)} entries, but {n} layers are patched.")
    return value


def _ends(value: float | tuple[float, float]) -> tuple[float, float]:
    return value if isinstance(value, tuple) else (value, value)


# --- What each field takes: checks that return the value in its normal form -----------------------------------------


def _check_integer(name: str, value: object, low: int, high: float, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={brief(value)}: {allowed} is needed.")
    if not low <= value <= high:
        limit = f"; at most {high:.0f}" if value > high else ""
        raise ValueError(f"{name}={brief(value)}: {allowed} is needed{limit}.")
    return value


def _check_count(name: str, value: object) -> Count:
    allowed = "a whole number ≥ 0, or one per patched layer,"
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return _check_integer(name, value, 0, math.inf, allowed)
    if not value:
        raise ValueError(f"{name}=[]: {allowed} is needed.")
    return tuple(_check_integer(name, entry, 0, math.inf, allowed) for entry in value)


def _check_dilation(name: str, value: object, depth: int = 0) -> Any:
    allowed = "a whole number ≥ 1, one per dilated head, or one such list per layer,"
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return _check_integer(name, value, 1, MAX_DILATION, allowed)
    if depth == 2:
        raise TypeError(f"{name}={brief(value)}: {allowed} is needed; this list is nested too deep.")
    entries = tuple(_check_dilation(name, entry, depth + 1) for entry in value)
    if None in entries or len({isinstance(entry, tuple) for entry in entries}) > 1:
        raise TypeError(f"{name}={brief(value)}: {allowed} is needed.")
    return entries


def _check_number(name: str, value: object) -> float:
    # JSON, YAML and command lines have no common literal for infinity.
    if isinstance(value, str) and value.strip().lower() in ("-inf", "inf", "+inf"):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={brief(value)}: a number is needed, got {type(value).__name__}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}={brief(value)}: the number is too large.") from None


def _check_start(name: str, value: object) -> float | tuple[float, float]:
    allowed = f"from {-MAX_START:g} to {MAX_START:g}"
    if isinstance(value, (list, tuple)):
        if len(value) != 2:
            raise ValueError(f"{name}={brief(value)}: one number, or the two ends (low, high), are needed.")
        low, high = (_check_number(name, end) for end in value)
        if not (abs(low) <= MAX_START and abs(high) <= MAX_START):
            raise ValueError(f"{name}={brief(value)}: the two ends (low, high) must be finite, {allowed}.")
        return low, high
    number = _check_number(name, value)
    if math.isinf(number) and name == "gate_init":
        return number  # a shut gate, or one that is wide open
    if not abs(number) <= MAX_START:
        shut = ", or float('-inf') for a shut gate" if name == "gate_init" else ""
        raise ValueError(f"{name}={number}: a number {allowed} is needed{shut}.")
    return number


def _check_scale(name: str, value: object) -> float:
    scale = _check_number(name, value)
    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise ValueError(
            f"{name}={scale}: a positive finite number is needed, from {MIN_SCALE:g} to {MAX_SCALE:g}; 1 stores plain "
            "values."
        )
    return scale


def _check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={brief(value)}: True or False is needed, got {type(value).__name__}.")
    return value


def _check_causal(name: str, value: object) -> bool | tuple[bool, ...] | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={brief(value)}: True, False, one of them per patched layer, or None is needed.")
    if not value:
        raise ValueError(f"{name}=[]: True, False, one of them per patched layer, or None is needed.")
    return tuple(_check_flag(name, entry) for entry in value)


def _check_layers(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple, range)):
        raise TypeError(f"{name}={brief(value)}: a list of layer indices is needed, or None for every layer.")
    if not 1 <= len(value) <= MAX_LAYERS:
        raise ValueError(
            f"{name} has {len(value)} indices: name at least one layer, at most {MAX_LAYERS}, or None for every layer."
        )
    layers = tuple(
        _check_integer(name, entry, 0, math.inf, "a list of layer indices, which count from 0,") for entry in value
    )
    if len(set(layers)) != len(layers):
        raise ValueError(f"{name}={brief(layers)}: an index is given more than once.")
    return layers


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(_COUNT_FIELDS, _check_count),
    "dilation": _check_dilation,
    **dict.fromkeys(("gate_init", "nu_init", "theta_init"), _check_start),
    **dict.fromkeys(("gate_per_head", "tie_pairs"), _check_flag),
    "layers": _check_layers,
    "causal": _check_causal,
    "parameter_scale": _check_scale,
}
