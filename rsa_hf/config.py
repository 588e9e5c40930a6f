"""`RSAConfig`: which attention heads become RSA heads, with which REM, and where their parameters start.

`RSAConfig` is what a user writes, for a whole model. `LayerConfig` is what it means for one layer.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rsa_hf.utils.text import brief

__all__ = ["COUNTS", "LayerConfig", "RSAConfig"]

Count = int | tuple[int, ...] | None

# Larger than in any model: bounds for a damaged config, which could otherwise ask for all memory.
MAX_HEADS = 4096
MAX_DILATION = 65_536

# Beyond these the stored values leave the range of float32.
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
MAX_START = 1e6

# The fields of `RSAConfig` that count heads.
COUNTS = ("num_regular", "num_cyclical_pairs", "num_dilated_regular", "num_dilated_cyclical_pairs")


@dataclass(frozen=True)
class LayerConfig:
    """The RSA heads of one attention layer (the paper's k1 … k6 and d, section 3).

    RSA heads come first, in the order regular, cos, sin, dilated regular, dilated cos, dilated sin; the plain
    heads follow. The i-th cos head and the i-th sin head of a kind are a pair.

    Attributes are those of `RSAConfig`, for this layer: `dilation` has one factor per dilated head, in head order;
    `gate_init` is a number; `nu_init` and `theta_init` are the two ends of a range.
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
        return self.num_eta + 2 * (self.num_cyclical_pairs + self.num_dilated_cyclical_pairs)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The base REM of each RSA head, `"regular"`, `"cos"` or `"sin"`, in head order."""

        def in_order(regular: int, pairs: int) -> tuple[str, ...]:
            return ("regular",) * regular + ("cos",) * pairs + ("sin",) * pairs

        dilated = in_order(self.num_dilated_regular, self.num_dilated_cyclical_pairs)
        return in_order(self.num_regular, self.num_cyclical_pairs) + dilated

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
    head if their number is odd. Each count is one number for all layers, or one per patched layer.

    The defaults are meant for pretrained models, and were chosen with `rsa-hf reproduce fine-tune` (RESULTS.md). A
    model trained from scratch learns faster with `RSAConfig.from_scratch`.

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
        if self.layers is None:
            return
        per_layer = [name for name in (*COUNTS, "causal") if isinstance(getattr(self, name), tuple)]
        per_layer += ["dilation"] if _is_nested(self.dilation) else []
        if per_layer and list(self.layers) != sorted(self.layers):
            # Entries could be meant in the order of `layers` or in the model's.
            raise ValueError(
                f"layers={brief(self.layers)}: with {', '.join(per_layer)} given per layer, indices must ascend, "
                "because the entries are for the layers in the model's order."
            )
        object.__setattr__(self, "layers", tuple(sorted(self.layers)))

    @classmethod
    def from_scratch(cls, num_heads: int) -> RSAConfig:
        """The config for a model that is trained from random weights.

        All heads are RSA heads in cyclical pairs, an odd one regular. Gates start at σ(1), as there is nothing that
        open gates could harm; ν at 0, a memory of few tokens, which can be learned first; θ is spread over (0, π), as
        pairs that start alike are slow to differ (results/start.md, made by `scripts/measure_start.py`).

        Args:
            num_heads: attention heads of each layer, H.

        Raises:
            TypeError: it is no whole number.
            ValueError: it is below 1.
        """
        _integer("num_heads", num_heads, "a whole number ≥ 1", low=1)
        return cls(
            num_regular=num_heads % 2,
            num_cyclical_pairs=num_heads // 2,
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
        if all(getattr(self, name) is None for name in COUNTS):
            if None in num_heads:
                raise ValueError("a plan without counts needs the number of heads of every layer. Give the counts.")
            halves = [max(1, (heads or 0) // 2) for heads in num_heads]
            counts = [(half % 2, half // 2, 0, 0) for half in halves]
        else:
            counts = list(zip(*(_per_layer(name, getattr(self, name) or 0, n) for name in COUNTS), strict=True))
        if isinstance(self.dilation, int) and not any(k4 or k5 for _, _, k4, k5 in counts):
            raise ValueError(
                f"dilation={self.dilation}: no dilated heads are asked for. Set num_dilated_regular or "
                "num_dilated_cyclical_pairs too."
            )
        low, high = _ends(self.gate_init)
        gates = [low + (high - low) * (i / (n - 1) if n > 1 else 0.5) for i in range(n)] if low != high else [low] * n
        dilations = self.dilation if _is_nested(self.dilation) else (self.dilation,) * n
        per_layer = zip(
            num_heads,
            counts,
            _per_layer("dilation", dilations, n),
            gates,
            _per_layer("causal", self.causal, n),
            strict=True,
        )
        plans = []
        for layer, (heads, (k1, k2, k4, k5), dilation, gate, causal) in enumerate(per_layer):
            used, limit = k1 + 2 * k2 + k4 + 2 * k5, MAX_HEADS if heads is None else heads
            if not 1 <= used <= limit:
                asked = ", ".join(f"{name}={count}" for name, count in zip(COUNTS, (k1, k2, k4, k5), strict=True))
                raise ValueError(
                    f"layer {layer} has {'at most ' if heads is None else ''}{limit} attention heads, but the plan "
                    f"asks for {used} RSA heads ({asked}; a pair is two heads). Ask for 1 to {limit}, or leave the "
                    "layer out with layers=[…]."
                )
            plans.append(
                LayerConfig(
                    num_regular=k1,
                    num_cyclical_pairs=k2,
                    num_dilated_regular=k4,
                    num_dilated_cyclical_pairs=k5,
                    dilation=_layer_dilation(layer, dilation, k4 + 2 * k5),
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
        columns = {name: tuple(getattr(plan, name) for plan in plans) for name in COUNTS}
        uniform: dict[str, Any] = {name: c[0] if len(set(c)) == 1 else c for name, c in columns.items()}
        return replace(self, **uniform)


def _is_nested(dilation: Any) -> bool:
    return isinstance(dilation, tuple) and any(isinstance(entry, tuple) for entry in dilation)


def _as_lists(value: Any) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, tuple) else value


def _ends(value: float | tuple[float, float]) -> tuple[float, float]:
    return value if isinstance(value, tuple) else (value, value)


def _per_layer(name: str, value: Any, n: int) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        return (value,) * n
    if len(value) != n:
        raise ValueError(
            f"{name}={brief(value)}: has {len(value)} entries, but {n} layers are patched. Give one per layer."
        )
    return value


def _layer_dilation(layer: int, dilation: int | tuple[int, ...] | None, dilated_heads: int) -> tuple[int, ...]:
    """The dilating factor of each dilated head of a layer."""
    if dilation is None and dilated_heads:
        raise ValueError(
            f"dilation=None: layer {layer} has {dilated_heads} dilated heads. Give one factor d ≥ 1, or one per "
            "dilated head."
        )
    factors = dilation if isinstance(dilation, tuple) else (dilation or 1,) * dilated_heads
    if len(factors) != dilated_heads:
        raise ValueError(
            f"dilation={brief(factors)}: has {len(factors)} entries, but layer {layer} has {dilated_heads} dilated "
            "heads (a dilated pair is two). Give one factor for all, or one per dilated head in the order dilated "
            "regular, dilated cos, dilated sin."
        )
    return factors


# --- what each field takes: checks that return the value in its normal form -----------------------------------------

_Check = Callable[[str, Any], Any]


def _integer(name: str, value: Any, allowed: str, low: int = 0, high: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={brief(value)}: {allowed} is needed.")
    if not low <= value <= high:
        limit = f"; at most {high:.0f}" if value > high else ""
        raise ValueError(f"{name}={brief(value)}: {allowed} is needed{limit}.")
    return value


def _one_or_per_layer(check: _Check) -> _Check:
    """A check for None, one value for all layers, or a list of one per layer."""

    def check_all(name: str, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return None if value is None else check(name, value)
        if not value:
            raise ValueError(f"{name}=[]: one value, or one per patched layer, is needed.")
        return tuple(check(name, entry) for entry in value)

    return check_all


def _count(name: str, value: Any) -> int:
    return _integer(name, value, "a whole number ≥ 0, or one per patched layer,")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={brief(value)}: True or False is needed, got {type(value).__name__}.")
    return value


def _dilation(name: str, value: Any, depth: int = 0) -> Any:
    allowed = "a whole number ≥ 1, one per dilated head, or one such list per layer,"
    if value is None and depth == 0:
        return None
    if not isinstance(value, (list, tuple)):
        return _integer(name, value, allowed, 1, MAX_DILATION)
    if depth == 2:
        raise TypeError(f"{name}={brief(value)}: {allowed} is needed; this list is nested too deep.")
    entries = tuple(_dilation(name, entry, depth + 1) for entry in value)
    if len({isinstance(entry, tuple) for entry in entries}) > 1:
        raise TypeError(f"{name}={brief(value)}: {allowed} is needed.")
    return entries


def _number(name: str, value: Any) -> float:
    # JSON, YAML and command lines have no common literal for infinity.
    if isinstance(value, str) and value.strip().lower() in ("-inf", "inf", "+inf"):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={brief(value)}: a number is needed, got {type(value).__name__}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}={brief(value)}: the number is too large.") from None


def _start(name: str, value: Any) -> float | tuple[float, float]:
    allowed = f"from {-MAX_START:g} to {MAX_START:g}"
    if isinstance(value, (list, tuple)):
        if len(value) != 2:
            raise ValueError(f"{name}={brief(value)}: one number, or the two ends (low, high), are needed.")
        low, high = (_number(name, end) for end in value)
        if not (abs(low) <= MAX_START and abs(high) <= MAX_START):
            raise ValueError(f"{name}={brief(value)}: the two ends (low, high) must be finite, {allowed}.")
        return low, high
    number = _number(name, value)
    if math.isinf(number) and name == "gate_init":
        return number  # a shut gate, or one that is wide open
    if not abs(number) <= MAX_START:
        shut = ", or float('-inf') for a shut gate" if name == "gate_init" else ""
        raise ValueError(f"{name}={number}: a number {allowed} is needed{shut}.")
    return number


def _scale(name: str, value: Any) -> float:
    scale = _number(name, value)
    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise ValueError(
            f"{name}={scale}: a positive finite number is needed, from {MIN_SCALE:g} to {MAX_SCALE:g}; 1 stores plain "
            "values."
        )
    return scale


def _layers(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple, range)):
        raise TypeError(f"{name}={brief(value)}: a list of layer indices is needed, or None for every layer.")
    if not value:
        raise ValueError(f"{name}=[]: name at least one layer, or None for every layer.")
    layers = tuple(_integer(name, entry, "a list of layer indices, which count from 0,") for entry in value)
    if len(set(layers)) != len(layers):
        raise ValueError(f"{name}={brief(layers)}: an index is given more than once.")
    return layers


_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(COUNTS, _one_or_per_layer(_count)),
    "dilation": _dilation,
    **dict.fromkeys(("gate_init", "nu_init", "theta_init"), _start),
    **dict.fromkeys(("gate_per_head", "tie_pairs"), _flag),
    "layers": _layers,
    "causal": _one_or_per_layer(_flag),
    "parameter_scale": _scale,
}
