"""`RSAConfig`: which attention heads become RSA heads, with which REM, and where their parameters start.

`RSAConfig` is what a user writes, for a whole model; a `HeadConfig` in it names a single head. `LayerConfig` is what
it means for one layer.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rsa_hf.rem import KINDS
from rsa_hf.utils.text import brief

__all__ = ["COUNTS", "HeadConfig", "LayerConfig", "RSAConfig"]

Count = int | tuple[int, ...] | None

# Larger than in any model: bounds for a damaged config, which could otherwise ask for all memory.
MAX_HEADS = 4096
MAX_NAMED_HEADS = 65_536
MAX_DILATION = 65_536

# Beyond these the stored values leave the range of float32.
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
MAX_START = 1e6

# The fields of `RSAConfig` that count heads, and those that go with `heads`.
COUNTS = ("num_regular", "num_cyclical_pairs", "num_dilated_regular", "num_dilated_cyclical_pairs")
_WITH_HEADS = ("layers", "causal", "parameter_scale")


@dataclass(frozen=True)
class HeadConfig:
    """One attention head that becomes an RSA head, by its index, and where its parameters start.

    Args:
        layer: index of its self-attention layer, counted as in `RSAConfig.layers`.
        head: index of the head in the layer.
        kind: the base REM, `"regular"`, `"cos"` or `"sin"`.
        decay: initial λ, between −1 and 1, of a regular head; initial γ, between 0 and 1, of a cyclical one.
        gate: initial g, from 0 to 1.
        theta: initial θ in radians; not read for regular heads.
        dilation: d, a whole number ≥ 1.

    Raises:
        TypeError: a field has a type that does not fit.
        ValueError: a field has a value that is not allowed; the message names it.
    """

    layer: int
    head: int
    kind: str
    decay: float
    gate: float
    theta: float = 0.0
    dilation: int = 1

    def __post_init__(self) -> None:
        for name, check in _HEAD_CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        low = -1 if self.kind == "regular" else 0
        if not low < self.decay < 1:
            raise ValueError(f"decay={self.decay}: a {self.kind} head needs a number between {low} and 1.")
        if not 0 <= self.gate <= 1:
            raise ValueError(f"gate={self.gate}: a number from 0, a shut gate, to 1 is needed.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadConfig:
        """Build a config from a mapping, as read from JSON or YAML.

        Raises:
            TypeError: `values` is no mapping, or a field is missing or has the wrong type.
            ValueError: an unknown key, or a value that is not allowed.
        """
        known = _require_known_keys(cls, values, "a head of an RSA plan", "setting of a head")
        missing = [name for name in known if name not in values and name not in ("theta", "dilation")]
        if missing:
            raise TypeError(f"a head of an RSA plan needs {', '.join(missing)} too: {brief(dict(values))}.")
        return cls(**values)


@dataclass(frozen=True)
class LayerConfig:
    """The RSA heads of one attention layer, R of them, and the parameters that they read.

    Attributes:
        heads: index of each RSA head among the layer's attention heads, ascending.
        kinds: the base REM of each RSA head, `"regular"`, `"cos"` or `"sin"`.
        dilations: the dilating factor of each RSA head.
        rates: place of each RSA head's rate in the list of all η, then all ν, of the layer. The heads of a tied pair
            have one place.
        gate_per_head: one μ per RSA head instead of one for all.
        parameter_scale: as in `RSAConfig`.
        causal: as in `RSAConfig`.
        mu: where μ starts, of length R or 1.
        eta: where each η starts.
        nu: where each ν starts.
        theta: where each θ starts, in radians, of the length of `nu`. Starts are not compared by `==`: a model and its
            saved copy have the same heads wherever they started.
    """

    heads: tuple[int, ...]
    kinds: tuple[str, ...]
    dilations: tuple[int, ...]
    rates: tuple[int, ...]
    gate_per_head: bool
    parameter_scale: float
    causal: bool | None
    mu: tuple[float, ...] = field(compare=False)
    eta: tuple[float, ...] = field(compare=False)
    nu: tuple[float, ...] = field(compare=False)
    theta: tuple[float, ...] = field(compare=False)

    @property
    def num_rsa_heads(self) -> int:
        """Number of RSA heads, R."""
        return len(self.heads)


@dataclass(frozen=True)
class RSAConfig:
    """The RSA heads that `patch_model` puts on a model.

    Without counts, half of the heads of every layer (at least one) become RSA heads: cyclical pairs, and one regular
    head if their number is odd. Each count is one number for all layers, or one per patched layer. RSA heads are a
    layer's first ones, in the order regular, cos, sin, dilated regular, dilated cos, dilated sin (the paper's k1 … k6,
    section 3); the i-th cos head and the i-th sin head are a pair. `heads` names single heads instead.

    For a pretrained model, `rsa_hf.calibrate` returns a config that names the heads on which recurrence helps, with
    their REMs and gates, which gains more than the defaults (RESULTS.md). The defaults keep a pretrained model nearly
    as it was, without looking at data. A model trained from scratch learns faster with `RSAConfig.from_scratch`.

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
        heads: the RSA heads by name, as `HeadConfig` or mappings, in place of the counts and what goes with them:
            every head has a gate, a rate and an angle of its own. `layers` are the layers that they name. No heads,
            `()`, is a plan that leaves a model plain.

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
    heads: tuple[HeadConfig, ...] | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.heads is not None:
            object.__setattr__(self, "layers", self._layers_of(self.heads))
        if self.layers is None:
            return
        if not self.layers and self.heads is None:
            raise ValueError("layers=[]: name at least one layer, or None for every layer.")
        per_layer = [name for name in (*COUNTS, "causal") if isinstance(getattr(self, name), tuple)]
        per_layer += ["dilation"] if _is_nested(self.dilation) else []
        if per_layer and list(self.layers) != sorted(self.layers):
            # Entries could be meant in the order of `layers` or in the model's.
            raise ValueError(
                f"layers={brief(self.layers)}: with {', '.join(per_layer)} given per layer, indices must ascend, "
                "because the entries are for the layers in the model's order."
            )
        object.__setattr__(self, "layers", tuple(sorted(self.layers)))

    def _layers_of(self, heads: tuple[HeadConfig, ...]) -> tuple[int, ...]:
        """The layers of a plan that names single heads, checked against the other fields."""
        others = [each.name for each in fields(self) if each.name not in ("heads", *_WITH_HEADS)]
        if given := [name for name in others if getattr(self, name) != getattr(type(self), name)]:
            raise ValueError(f"heads: the plan names single heads, so {', '.join(given)} cannot be given too.")
        layers = tuple(sorted({head.layer for head in heads}))
        if self.layers is not None and tuple(sorted(self.layers)) != layers:
            raise ValueError(
                f"layers={brief(self.layers)}: the heads are in layers {list(layers)}. Give layers=None: they follow "
                "from the heads."
            )
        return layers

    @classmethod
    def from_scratch(cls, num_heads: int) -> RSAConfig:
        """The config for a model that is trained from random weights.

        All heads are RSA heads in cyclical pairs, an odd one regular. Gates start at σ(1), as there is nothing that
        open gates could harm; ν at 0, a memory of few tokens, which can be learned first; θ is spread over (0, π), as
        pairs that start alike are slow to differ (results/start.md, made by `python -m experiments start`).

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
        _require_known_keys(cls, values, "an RSA plan", "RSA setting")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields that apply as plain lists, numbers and booleans; `from_dict` reads them back."""
        names = [each.name for each in fields(self) if each.name != "heads"] if self.heads is None else _WITH_HEADS
        values = {name: _as_lists(getattr(self, name)) for name in names}
        return values if self.heads is None else {**values, "heads": [vars(head).copy() for head in self.heads]}

    def layer_plans(self, num_heads: Sequence[int | None]) -> list[LayerConfig]:
        """The config of each patched layer.

        Args:
            num_heads: number of attention heads H of each patched layer; None where it is not known: a checkpoint
                has its counts written out.

        Raises:
            ValueError: more RSA heads than heads, a list of the wrong length, dilated heads without dilation, or
                dilation without dilated heads.
        """
        causal = _per_layer("causal", self.causal, len(num_heads))
        if self.heads is not None:
            return self._named_layers(self.heads, num_heads, causal)
        n = len(num_heads)
        low, high = _ends(self.gate_init)
        gates = [low + (high - low) * (i / (n - 1) if n > 1 else 0.5) for i in range(n)] if low != high else [low] * n
        counted = zip(num_heads, self._counts(num_heads), gates, causal, strict=True)
        dilations = _per_layer("dilation", self.dilation if _is_nested(self.dilation) else (self.dilation,) * n, n)
        plans = []
        for layer, (heads, counts, gate, is_causal) in enumerate(counted):
            k1, k2, k4, k5 = counts
            used, limit = k1 + 2 * k2 + k4 + 2 * k5, MAX_HEADS if heads is None else heads
            if not 1 <= used <= limit:
                asked = ", ".join(f"{name}={count}" for name, count in zip(COUNTS, counts, strict=True))
                raise ValueError(
                    f"layer {layer} has {'at most ' if heads is None else ''}{limit} attention heads, but the plan "
                    f"asks for {used} RSA heads ({asked}; a pair is two heads). Ask for 1 to {limit}, or leave the "
                    "layer out with layers=[…]."
                )
            dilation = _layer_dilation(layer, dilations[layer], k4 + 2 * k5)
            plans.append(self._counted_layer(counts, dilation, gate, is_causal))
        return plans

    def _counts(self, num_heads: Sequence[int | None]) -> list[tuple[int, int, int, int]]:
        """k1, k2, k4 and k5 of each patched layer."""
        if all(getattr(self, name) is None for name in COUNTS):
            if None in num_heads:
                raise ValueError("a plan without counts needs the number of heads of every layer. Give the counts.")
            halves = [max(1, (heads or 0) // 2) for heads in num_heads]
            counts = [(half % 2, half // 2, 0, 0) for half in halves]
        else:
            columns = (_per_layer(name, getattr(self, name) or 0, len(num_heads)) for name in COUNTS)
            counts = list(zip(*columns, strict=True))
        if isinstance(self.dilation, int) and not any(k4 or k5 for _, _, k4, k5 in counts):
            raise ValueError(
                f"dilation={self.dilation}: no dilated heads are asked for. Set num_dilated_regular or "
                "num_dilated_cyclical_pairs too."
            )
        return counts

    def _counted_layer(
        self, counts: tuple[int, int, int, int], dilation: tuple[int, ...], gate: float, causal: bool | None
    ) -> LayerConfig:
        """A layer whose first heads are RSA heads. η starts spread over [−2, −1] ∪ [1, 2] (paper, section 3)."""
        k1, k2, k4, k5 = counts
        R, num_eta, copies = k1 + 2 * k2 + k4 + 2 * k5, k1 + k4, 1 if self.tie_pairs else 2
        # Untied: the cos heads of a kind, then its sin heads, each starting as the tied pair would.
        starts = [*[*range(k2)] * copies, *[*range(k2, k2 + k5)] * copies]
        middles = [(pair + 0.5) / (k2 + k5) for pair in starts]
        nu, dilated_nu = range(num_eta, num_eta + copies * k2), range(num_eta + copies * k2, num_eta + len(starts))
        return LayerConfig(
            heads=tuple(range(R)),
            kinds=(*_kinds(k1, k2), *_kinds(k4, k5)),
            dilations=(1,) * (R - len(dilation)) + dilation,
            rates=(*range(k1), *[*nu] * (2 // copies), *range(k1, num_eta), *[*dilated_nu] * (2 // copies)),
            gate_per_head=self.gate_per_head,
            parameter_scale=self.parameter_scale,
            causal=causal,
            mu=(gate,) * (R if self.gate_per_head else 1),
            eta=tuple(_spread_over_both_signs((i + 0.5) / num_eta) for i in range(num_eta)),
            nu=tuple(_between(self.nu_init, middle) for middle in middles),
            theta=tuple(_between(self.theta_init, middle) for middle in middles),
        )

    def _named_layers(
        self, heads: tuple[HeadConfig, ...], num_heads: Sequence[int | None], causal: Sequence[bool | None]
    ) -> list[LayerConfig]:
        """The layers of a plan that names single heads."""
        assert self.layers is not None
        if len(num_heads) != len(self.layers):
            raise ValueError(f"heads: they are in {len(self.layers)} layers, but {len(num_heads)} layers are patched.")
        plans = []
        for layer, limit, is_causal in zip(self.layers, num_heads, causal, strict=True):
            of_layer = [head for head in heads if head.layer == layer]
            if limit is not None and of_layer[-1].head >= limit:
                raise ValueError(
                    f"heads: layer {layer} has {limit} attention heads, so there is no head {of_layer[-1].head}. "
                    f"Indices go from 0 to {limit - 1}."
                )
            regular = [head for head in of_layer if head.kind == "regular"]
            cyclical = [head for head in of_layer if head.kind != "regular"]
            in_order = [*regular, *cyclical]
            plans.append(
                LayerConfig(
                    heads=tuple(head.head for head in of_layer),
                    kinds=tuple(head.kind for head in of_layer),
                    dilations=tuple(head.dilation for head in of_layer),
                    rates=tuple(in_order.index(head) for head in of_layer),
                    gate_per_head=True,
                    parameter_scale=self.parameter_scale,
                    causal=is_causal,
                    mu=tuple(_logit(head.gate) for head in of_layer),
                    eta=tuple(math.atanh(head.decay) for head in regular),
                    nu=tuple(_logit(head.decay) for head in cyclical),
                    theta=tuple(head.theta for head in cyclical),
                )
            )
        return plans

    def resolved(self, num_heads: Sequence[int]) -> RSAConfig:
        """The same config with the default plan written out, so that a checkpoint does not depend on defaults.

        Args:
            num_heads: number of attention heads H of each patched layer.
        """
        self.layer_plans(num_heads)  # raises where the config does not fit
        if self.heads is not None:
            return self
        columns = dict(zip(COUNTS, zip(*self._counts(num_heads), strict=True), strict=True))
        uniform: dict[str, Any] = {name: c[0] if len(set(c)) == 1 else c for name, c in columns.items()}
        return replace(self, **uniform)


def _require_known_keys(cls: type[Any], values: Any, what: str, key_of: str) -> list[str]:
    """Check that `values` is a mapping whose keys are fields of a dataclass; the names of the fields."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} is a mapping of fields to values, got {type(values).__name__}: {brief(values)}")
    known = [each.name for each in fields(cls)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:100], known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown {key_of} {brief(key)}.{hint} Allowed: {', '.join(known)}.")
    return known


def _is_nested(dilation: Any) -> bool:
    return isinstance(dilation, tuple) and any(isinstance(entry, tuple) for entry in dilation)


def _as_lists(value: Any) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, tuple) else value


def _ends(value: float | tuple[float, float]) -> tuple[float, float]:
    return value if isinstance(value, tuple) else (value, value)


def _between(value: float | tuple[float, float], fraction: float) -> float:
    low, high = _ends(value)
    return low + (high - low) * fraction


def _kinds(regular: int, pairs: int) -> tuple[str, ...]:
    return ("regular",) * regular + ("cos",) * pairs + ("sin",) * pairs


def _spread_over_both_signs(fraction: float) -> float:
    """Map fractions from 0 to 1 to [−2, −1] and then [1, 2]."""
    return -2 + 2 * fraction if fraction < 0.5 else 2 * fraction


def _logit(p: float) -> float:
    return math.log(p / (1 - p)) if 0 < p < 1 else math.copysign(math.inf, p - 0.5)


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
    layers = tuple(_integer(name, entry, "a list of layer indices, which count from 0,") for entry in value)
    if len(set(layers)) != len(layers):
        raise ValueError(f"{name}={brief(layers)}: an index is given more than once.")
    return layers


def _heads(name: str, value: Any) -> tuple[HeadConfig, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={brief(value)}: a list of heads is needed, or None to count them.")
    if len(value) > MAX_NAMED_HEADS:
        raise ValueError(f"{name}: {len(value):,} heads are named; at most {MAX_NAMED_HEADS:,} are possible.")
    heads = [head if isinstance(head, HeadConfig) else HeadConfig.from_dict(head) for head in value]
    heads.sort(key=lambda head: (head.layer, head.head))
    for one, other in itertools.pairwise(heads):
        if (one.layer, one.head) == (other.layer, other.head):
            raise ValueError(f"{name}: head {one.head} of layer {one.layer} is named more than once.")
    return tuple(heads)


def _kind(name: str, value: Any) -> str:
    if value not in KINDS:
        raise ValueError(f"{name}={brief(value)}: choose from {', '.join(KINDS)}.")
    return str(value)


def _index(name: str, value: Any) -> int:
    return _integer(name, value, "an index, which counts from 0,", high=MAX_HEADS - 1)


def _angle(name: str, value: Any) -> float:
    angle = _number(name, value)
    if not abs(angle) <= MAX_START:
        raise ValueError(f"{name}={angle}: a number from {-MAX_START:g} to {MAX_START:g} is needed.")
    return angle


_HEAD_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(("layer", "head"), _index),
    "kind": _kind,
    **dict.fromkeys(("decay", "gate"), _number),
    "theta": _angle,
    "dilation": lambda name, value: _integer(name, value, "a whole number ≥ 1", 1, MAX_DILATION),
}

_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(COUNTS, _one_or_per_layer(_count)),
    "dilation": _dilation,
    **dict.fromkeys(("gate_init", "nu_init", "theta_init"), _start),
    **dict.fromkeys(("gate_per_head", "tie_pairs"), _flag),
    "layers": _layers,
    "causal": _one_or_per_layer(_flag),
    "parameter_scale": _scale,
    "heads": lambda name, value: None if value is None else _heads(name, value),
}
