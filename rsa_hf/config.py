"""`RSAConfig`: which attention heads become RSA heads, with which REM, and where their parameters start.

The config counts heads, or names them as `HeadConfig`s; counts stand for named heads. `LayerSpec` is what the config
means for one layer.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn, TypeVar

import torch

from rsa_hf.ops.problem import HeadRow, Layout
from rsa_hf.rem import FREE_LAGS, KINDS, lag_weights
from rsa_hf.utils.text import brief, did_you_mean

MAX_HEADS = 4096  # more than in any model: a damaged config could otherwise ask for all memory

# The fields of `RSAConfig` that count heads, and those that go with `heads`.
COUNTS = ("num_regular", "num_cyclical_pairs", "num_dilated_regular", "num_dilated_cyclical_pairs")
_WITH_HEADS = ("layers", "causal", "parameter_scale", "gate_per_head", "num_free_lags")


@dataclass(frozen=True)
class HeadConfig:
    """One attention head that becomes an RSA head, by its index, and where its parameters start.

    Args:
        layer: index of its self-attention layer, counted as in `RSAConfig.layers`.
        head: its index in the layer.
        kind: the base REM, `"regular"`, `"cos"` or `"sin"`.
        decay: initial λ, between −1 and 1, of a regular head; initial γ, between 0 and 1, of a cyclical one.
        gate: initial g, from 0 to 1.
        theta: initial θ in radians; ignored for regular heads.
        dilation: d, a whole number ≥ 1.
        pair: cyclical heads of a layer with the same number share (ν, θ), which start at the values of the first of
            them. None: the head has its own. Ignored for regular heads.
        free_lags: initial weights of the first steps, as many as `num_free_lags`; if that is 0, their number sets it.
            None: the paper's weights, if other heads have free lags.

    Raises:
        TypeError, ValueError: a field has a type or a value that is not allowed.
    """

    layer: int
    head: int
    kind: str
    decay: float
    gate: float
    theta: float = 0.0
    dilation: int = 1
    pair: int | None = None
    free_lags: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.kind not in KINDS:
            _refuse("kind", self.kind, f"one of {', '.join(KINDS)}")
        low = -1 if self.kind == "regular" else 0
        if not low < self.decay < 1:
            _refuse("decay", self.decay, f"a number between {low} and 1, for a {self.kind} head,")

    @property
    def rate(self) -> int:
        """A number that is the same for all heads of a layer that share (ν, θ)."""
        return -1 - self.head if self.pair is None or self.kind == "regular" else self.pair


@dataclass(frozen=True)
class LayerSpec:
    """The RSA heads of one attention layer, the parameters that they read, and where these start."""

    layout: Layout
    causal: bool | None
    # Initial parameters: μ, one for all heads or one per head; η; ν; θ in radians, one per ν; the free lags of each
    # head. They are not compared: a model and its saved copy have the same heads wherever they started.
    mu: tuple[float, ...] = field(compare=False)
    eta: tuple[float, ...] = field(compare=False)
    nu: tuple[float, ...] = field(compare=False)
    theta: tuple[float, ...] = field(compare=False)
    free_lags: tuple[float, ...] = field(compare=False)


@dataclass(frozen=True)
class RSAConfig:
    """The RSA heads that `patch_model` puts on a model.

    Without counts, half of the heads of every layer (at least one; `share_of_heads`) become RSA heads: cyclical pairs,
    and one regular head if their number is odd. Counts are for each patched layer. RSA heads are a layer's first ones,
    in the order regular, cos, sin, dilated regular, dilated cos, dilated sin (the paper's k1 … k6, section 3); the
    i-th cos head and the i-th sin head are a pair, and share (ν, θ). `heads` names single heads instead.

    The defaults change a pretrained model little. `rsa_hf.calibrate` makes such a model better (RESULTS.md): it names
    the heads on which recurrence helps. A model trained from scratch learns faster with `RSAConfig.from_scratch`.

    Args:
        share_of_heads: the share of a layer's heads that become RSA heads, if no counts are given.
        num_regular: number of regular REM heads, k1 (λ = tanh η).
        num_cyclical_pairs: number of cos/sin pairs, k2 = k3 (γ = sigmoid ν, θ).
        num_dilated_regular: number of dilated regular heads, k4.
        num_dilated_cyclical_pairs: number of dilated cos/sin pairs, k5 = k6.
        dilation: the dilating factor d ≥ 1: one for all dilated heads, or one per dilated head in head order
            (dilated regular, dilated cos, dilated sin), e.g. `[3, 6, 9, 12]`.
        gate_init: initial μ, where the gate is σ(μ). −3 keeps a pretrained model nearly as it was; `float("-inf")`
            shuts the gate, and outputs are then bitwise those of the unpatched model.
        nu_init: initial ν, where γ is sigmoid ν: one number for all pairs, or `(low, high)`; the pairs of a layer then
            start at the midpoints of equal parts of that range. The default is the paper's (section 3).
        theta_init: initial θ in radians, given in the same way. The default is the paper's.
        gate_per_head: one μ per RSA head (an extension) instead of one per layer (the paper). None: one per layer, and
            one per head where `heads` names them. A shared μ starts at the gate of the layer's first RSA head.
        layers: ascending indices of the self-attention layers to patch, counted over all self-attention modules of
            the model in module order (for an encoder-decoder: the encoder's first). None: every layer.
        causal: True for masked REMs, False for unmasked ones, which still see no key that attention hides, or one such
            value per patched layer; None: the direction of the attention module.
        parameter_scale: RSA parameters are stored as value / parameter_scale, so that Adam and its relatives move
            the values parameter_scale times as fast as the weights. 1 stores the plain values: 1,000 steps of Adam
            at 5e-5 then move a gate's μ by about 0.05.
        num_free_lags: K ≤ 8, the number of first steps whose weights are free (an extension): for each head, f(kd) for
            k = 1 … K are separate parameters, which start as in the paper and learn as fast as the weights. In the
            paper, a head with a short memory is also weak: f(1) is λ or γ cos θ.
        heads: the RSA heads by name, as `HeadConfig` or mappings, instead of the counts and the settings that go with
            them. `layers` are then the layers that these heads name. `()`, no heads, leaves a model plain.

    Raises:
        TypeError, ValueError: a field has a type or a value that is not allowed.
    """

    num_regular: int | None = None
    num_cyclical_pairs: int | None = None
    num_dilated_regular: int | None = None
    num_dilated_cyclical_pairs: int | None = None
    dilation: int | tuple[int, ...] | None = None
    gate_init: float = -3.0
    nu_init: float | tuple[float, float] = (1.0, 2.0)
    theta_init: float | tuple[float, float] = math.pi / 4
    gate_per_head: bool | None = None
    layers: tuple[int, ...] | None = None
    causal: bool | tuple[bool, ...] | None = None
    parameter_scale: float = 20.0
    num_free_lags: int = 0
    heads: tuple[HeadConfig, ...] | None = None
    share_of_heads: float = 0.5

    def __post_init__(self) -> None:
        _check_fields(self)
        for name in ("nu_init", "theta_init"):
            if isinstance(ends := getattr(self, name), tuple) and len(ends) != 2:
                _refuse(name, ends, "one number, or the two ends (low, high),")
        if self.gate_per_head is None:
            object.__setattr__(self, "gate_per_head", self.heads is not None)
        if self.heads is None:
            is_list = isinstance(self.layers, tuple) and self.layers
            if self.layers is not None and not (is_list and self.layers == tuple(sorted(set(self.layers)))):
                _refuse("layers", self.layers, "a list of ascending indices, or None for every layer,")
            return
        heads = _heads(self.heads)
        others = [each for each in fields(self) if each.name not in ("heads", *_WITH_HEADS)]
        if given := [each.name for each in others if getattr(self, each.name) != each.default]:
            raise ValueError(f"heads: the config names single heads, so {', '.join(given)} cannot be given too.")
        layers = tuple(sorted({head.layer for head in heads}))
        if self.layers not in (None, layers):
            _refuse("layers", self.layers, f"None, or the layers of the heads, {list(layers)},")
        for lags in (head.free_lags for head in heads if head.free_lags is not None):
            if self.num_free_lags == 0:
                object.__setattr__(self, "num_free_lags", _check("num_free_lags", len(lags)))
            if len(lags) != self.num_free_lags:
                _refuse("free_lags", lags, f"None, or {self.num_free_lags} numbers, as for the other heads,")
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "layers", layers)

    @classmethod
    def from_scratch(cls, num_heads: int | None = None) -> "RSAConfig":
        """The config for a model that is trained from random weights.

        All heads are RSA heads in cyclical pairs (an odd one is regular), with the first two lags free. Gates start at
        σ(1), ν at 0 (a memory of few tokens), and θ is spread over (0, π). Gates and rates learn as fast as the
        weights. A rule chose this config over other starts, forms and paces: `python -m experiments defaults`.

        With `num_heads`, the number of attention heads in each layer, the config has counts.
        """
        config = cls(
            share_of_heads=1.0,
            gate_init=1.0,
            nu_init=0.0,
            theta_init=(0.0, math.pi),
            num_free_lags=2,
            parameter_scale=1.0,
        )
        return config if num_heads is None else config.resolved([_check("num_heads", num_heads)])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RSAConfig":
        """Build a config from a mapping, as read from JSON or YAML; an unknown key is a ValueError."""
        return _from_mapping(cls, "RSA setting", values)

    def to_dict(self) -> dict[str, Any]:
        """The fields that apply, as plain lists, numbers and booleans; `from_dict` reads them back."""
        names = [each.name for each in fields(self) if each.name != "heads"] if self.heads is None else _WITH_HEADS
        values = {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in names}
        if not self.num_free_lags:
            del values["num_free_lags"]  # earlier versions do not know this key
        if self.share_of_heads == RSAConfig.share_of_heads:
            values.pop("share_of_heads", None)  # nor this, and plans are written with counts
        if self.heads is not None:
            values["heads"] = [{k: v for k, v in vars(head).items() if v is not None} for head in self.heads]
        return values

    def layer_specs(self, num_heads: Sequence[int | None]) -> list[LayerSpec]:
        """What the config means for each patched layer.

        `num_heads` has the number of attention heads H of each layer, or None where it is not known. A checkpoint does
        not need it: its counts are written out. A config that does not fit raises a ValueError.
        """
        n = len(num_heads)
        if self.layers is not None and len(self.layers) != n:
            _refuse("layers", self.layers, f"one index for each of the {n} patched layers")
        causal = self.causal if isinstance(self.causal, tuple) else (self.causal,) * n
        if len(causal) != n:
            _refuse("causal", causal, f"one value, or one for each of the {n} patched layers,")
        if self.heads is not None:
            named = [list(heads) for _, heads in itertools.groupby(self.heads, lambda head: head.layer)]
            layers = [self._layer(heads, H) for heads, H in zip(named, num_heads, strict=True)]
        else:  # layers with the same number of heads are equal
            of_size = {H: self._layer(self.counted_heads(num_heads.index(H), H), H) for H in dict.fromkeys(num_heads)}
            layers = [of_size[H] for H in num_heads]
        return [replace(layer, causal=is_causal) for layer, is_causal in zip(layers, causal, strict=True)]

    def resolved(self, num_heads: Sequence[int | None]) -> "RSAConfig":
        """The same config in a form without defaults, for a checkpoint; `num_heads` is as for `layer_specs`.

        Counts are written out; if they are not the same for all layers, the heads are named instead.
        """
        if self.heads is not None:
            return self
        counts = {self._counts(num_heads.index(H), H) for H in dict.fromkeys(num_heads)}
        if len(counts) == 1:
            written_out: dict[str, Any] = dict(zip(COUNTS, counts.pop(), strict=True))
            return replace(self, share_of_heads=RSAConfig.share_of_heads, **written_out)
        layers = zip(self.layers or range(len(num_heads)), num_heads, strict=True)
        heads = tuple(head for layer, H in layers for head in self.counted_heads(layer, H))
        return RSAConfig(heads=heads, **{name: getattr(self, name) for name in _WITH_HEADS})

    def _counts(self, layer: int, num_heads: int | None) -> tuple[int, int, int, int]:
        """k1, k2, k4 and k5 of a layer."""
        k1, k2, k4, k5 = (getattr(self, name) or 0 for name in COUNTS)
        if all(getattr(self, name) is None for name in COUNTS):
            if num_heads is None:
                raise ValueError("a config without counts needs the number of heads of every layer. Give the counts.")
            count = max(1, int(num_heads * self.share_of_heads))
            k1, k2 = count % 2, count // 2
        used, limit = k1 + 2 * k2 + k4 + 2 * k5, num_heads or MAX_HEADS
        if not 1 <= used <= limit:
            asked = ", ".join(f"{name}={count}" for name, count in zip(COUNTS, (k1, k2, k4, k5), strict=True))
            raise ValueError(
                f"layer {layer} can have 1 to {limit} RSA heads, but the config asks for {used} ({asked}; a pair is "
                "two heads). Ask for fewer, or leave the layer out with layers=[…]."
            )
        return k1, k2, k4, k5

    def counted_heads(self, layer: int, num_heads: int | None) -> list[HeadConfig]:
        """The heads that the counts stand for in a layer; η is spread over [−2, −1] ∪ [1, 2] (paper, section 3)."""
        k1, k2, k4, k5 = self._counts(layer, num_heads)
        regular = [("regular", i, (i + 0.5) / (k1 + k4)) for i in range(k1 + k4)]
        cos, sin = ([(kind, i, (i + 0.5) / (k2 + k5)) for i in range(k2 + k5)] for kind in ("cos", "sin"))
        in_order = [*regular[:k1], *cos[:k2], *sin[:k2], *regular[k1:], *cos[k2:], *sin[k2:]]
        dilated = k4 + 2 * k5
        factors = self.dilation if isinstance(self.dilation, tuple) else (self.dilation or 1,) * dilated
        if len(factors) != dilated or bool(self.dilation) is not bool(dilated):
            _refuse("dilation", self.dilation, f"one factor, or one for each of the {dilated} dilated heads,")
        dilations = (1,) * (k1 + 2 * k2) + factors
        heads = []
        for head, ((kind, i, fraction), d) in enumerate(zip(in_order, dilations, strict=True)):
            if kind == "regular":
                decay, theta, pair = math.tanh(2 * fraction - (2 if fraction < 0.5 else 0)), 0.0, None
            else:
                gamma = _sigmoid(_between(self.nu_init, fraction))
                decay, theta, pair = min(max(gamma, 1e-300), 1 - 2**-53), _between(self.theta_init, fraction), i
            heads.append(HeadConfig(layer, head, kind, decay, _sigmoid(self.gate_init), theta, d, pair))
        return heads

    def _layer(self, heads: Sequence[HeadConfig], num_heads: int | None) -> LayerSpec:
        """The spec of a layer with these heads, without a direction."""
        if num_heads is not None and heads[-1].head >= num_heads:
            _refuse("head", heads[-1].head, f"an index below {num_heads}, the heads of layer {heads[-1].layer},")
        regular = [head for head in heads if head.kind == "regular"]
        cyclical: dict[int, HeadConfig] = {}
        for head in heads:
            if head.kind != "regular":
                cyclical.setdefault(head.rate, head)
        # Where a head reads its rate: a regular head in η, a cyclical one in ν and θ, where a pair shares one place.
        places = {head.rate: i for i, head in enumerate(regular)} | {rate: i for i, rate in enumerate(cyclical)}
        rows = []
        for i, head in enumerate(heads):
            indices = (i if self.gate_per_head else 0, places[head.rate], i)
            rows.append(HeadRow(head.head, KINDS.index(head.kind), head.dilation, *indices))
        return LayerSpec(
            layout=Layout(tuple(rows), self.parameter_scale, self.num_free_lags),
            causal=None,
            mu=tuple(_logit(head.gate) for head in (heads if self.gate_per_head else heads[:1])),
            eta=tuple(math.atanh(head.decay) for head in regular),
            nu=tuple(_logit(head.decay) for head in cyclical.values()),
            theta=tuple(head.theta for head in cyclical.values()),
            free_lags=tuple(
                weight
                for head in heads
                for weight in head.free_lags or _first_weights(head, cyclical.get(head.rate, head), self.num_free_lags)
            ),
        )


def _first_weights(head: HeadConfig, of_rate: HeadConfig, count: int) -> list[float]:
    """The paper's weights of a head's first steps; its rate starts at that of the head `of_rate`."""
    steps = torch.arange(1, count + 1, device="cpu")
    return lag_weights(head.kind, of_rate.decay, of_rate.theta, 1, None, steps).tolist() if count else []


def _between(value: float | tuple[float, float], fraction: float) -> float:
    low, high = value if isinstance(value, tuple) else (value, value)
    return low + (high - low) * fraction


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _logit(p: float) -> float:
    return math.log(p / (1 - p)) if 0 < p < 1 else math.copysign(math.inf, p - 0.5)


# --- what each field takes ------------------------------------------------------------------------------------------

# The type, minimum and maximum of each field. Larger values occur in no model, or overflow float32 when stored.
_RANGES: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(COUNTS, (int, 0, MAX_HEADS)),
    **dict.fromkeys(("layers", "layer", "head", "pair"), (int, 0, MAX_HEADS - 1)),
    "num_heads": (int, 1, MAX_HEADS),
    "num_free_lags": (int, 0, FREE_LAGS[-1]),
    "dilation": (int, 1, 65_536),
    **dict.fromkeys(("gate_init", "nu_init", "theta_init", "theta", "free_lags"), (float, -1e6, 1e6)),
    "parameter_scale": (float, 1e-6, 1e6),
    "share_of_heads": (float, 0, 1),
    "decay": (float, -1, 1),
    "gate": (float, 0, 1),
    **dict.fromkeys(("gate_per_head", "causal"), (bool, False, True)),
}
_TYPES = {int: "a whole number from {:g} to {:g}", float: "a number from {:g} to {:g}", bool: "True or False"}

_Config = TypeVar("_Config", HeadConfig, RSAConfig)


def _refuse(name: str, value: Any, needed: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}={brief(value)}: {needed} is needed.")


def _check_fields(config: HeadConfig | RSAConfig) -> None:
    """Check the fields that are in `_RANGES`, and bring them to their normal form."""
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name not in _RANGES or (value is None and each.default is None):
            continue
        if "tuple" in str(each.type) and isinstance(value, (list, tuple, range)):
            checked: Any = tuple(_check(each.name, entry) for entry in value)
        else:
            checked = _check(each.name, value)
        object.__setattr__(config, each.name, checked)


def _check(name: str, value: Any) -> Any:
    kind: Any
    kind, low, high = _RANGES[name]
    needed = _TYPES[kind].format(low, high)
    if name == "gate_init":
        needed += ", or float('-inf') for a shut gate,"
        if value in ("-inf", "inf", math.inf, -math.inf):  # JSON and YAML have no common literal for it
            return float(value)
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (int, kind)):
        _refuse(name, value, needed, TypeError)
    if not low <= value <= high:
        _refuse(name, value, needed)
    return kind(value)


def _heads(value: Any) -> tuple[HeadConfig, ...]:
    if not isinstance(value, (list, tuple)):
        _refuse("heads", value, "a list of heads, or None to count them,", TypeError)
    heads = [
        each if isinstance(each, HeadConfig) else _from_mapping(HeadConfig, "setting of a head", each)
        for each in value
    ]
    heads.sort(key=lambda head: (head.layer, head.head))
    for one, other in itertools.pairwise(heads):
        if (one.layer, one.head) == (other.layer, other.head):
            raise ValueError(f"heads: head {one.head} of layer {one.layer} is named more than once.")
    return tuple(heads)


def _from_mapping(cls: type[_Config], what: str, values: Any) -> _Config:
    if not isinstance(values, Mapping):
        raise TypeError(f"expected {cls.__name__} or a mapping, got {type(values).__name__}: {brief(values)}")
    known = [each.name for each in fields(cls)]
    for key in values:
        if key not in known:
            hint = did_you_mean(str(key)[:100], known)
            raise ValueError(f"unknown {what} {brief(key)}.{hint} Allowed: {', '.join(known)}.")
    return cls(**values)
