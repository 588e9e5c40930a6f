"""RSAConfig: accepted and refused values, error messages, and layer specs."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rsa_hf import HeadConfig, RSAConfig, RSAHeads
from rsa_hf.rem import KINDS
from rsa_hf.saved_plan import read_plan, write_plan


def columns(spec):
    """The kinds, the dilations and the places of the rates of a layer's heads."""
    return tuple(zip(*((KINDS[row.kind], row.dilation, row.rate_index) for row in spec.layout.rows), strict=True))


def test_heads_have_the_order_and_the_dilations_of_the_counts():
    counts = {"num_regular": 2, "num_cyclical_pairs": 1, "num_dilated_regular": 1, "num_dilated_cyclical_pairs": 2}
    (spec,) = RSAConfig(**counts, dilation=[7, 3, 6, 9, 12]).layer_specs([12])
    kinds, dilations, rates = columns(spec)
    assert kinds == ("regular", "regular", "cos", "sin", "regular", "cos", "cos", "sin", "sin")
    assert dilations == (1, 1, 1, 1, 7, 3, 6, 9, 12)
    assert rates == (0, 1, 0, 0, 2, 1, 2, 1, 2)
    assert (len(kinds), len(spec.eta), len(spec.nu)) == (9, 3, 3)


@pytest.mark.parametrize("heads", range(1, 33))
def test_the_defaults_fit_any_head_count(heads):
    (spec,) = RSAConfig().layer_specs([heads])
    assert len(spec.layout.rows) == max(1, heads // 2)
    (resolved,) = RSAConfig().resolved([heads]).layer_specs([None])
    assert resolved == spec


def test_layers_of_unequal_sizes_are_saved_as_named_heads():
    config = RSAConfig(layers=[2, 5, 6], gate_init=-1.0, causal=True)
    resolved = config.resolved([6, 4, 6])
    assert resolved.layers == (2, 5, 6)
    stored = RSAConfig.from_dict(json.loads(json.dumps(resolved.to_dict())))
    assert stored == resolved == resolved.resolved([6, 4, 6])
    found, expected = stored.layer_specs([None] * 3), config.layer_specs([6, 4, 6])
    assert found == expected
    for one, other in zip(found, expected, strict=True):
        assert (one.mu, one.eta, one.nu, one.theta) == (other.mu, other.eta, other.nu, other.theta)
        assert one.mu == pytest.approx([-1.0])


@pytest.mark.parametrize(("heads", "regular", "pairs"), [(1, 1, 0), (2, 0, 1), (7, 1, 3), (8, 0, 4)])
def test_from_scratch_takes_all_heads(heads, regular, pairs):
    (spec,) = RSAConfig.from_scratch().layer_specs([heads])
    assert RSAConfig.from_scratch().resolved([heads]) == RSAConfig.from_scratch(heads)
    assert columns(spec)[0] == ("regular",) * regular + ("cos",) * pairs + ("sin",) * pairs
    assert spec.mu == pytest.approx([1])
    assert spec.nu == pytest.approx([0] * pairs)
    assert spec.theta == pytest.approx([math.pi * (i + 0.5) / pairs for i in range(pairs)])


@given(
    st.builds(
        dict,
        num_regular=st.integers(0, 3),
        num_cyclical_pairs=st.integers(0, 2),
        num_dilated_cyclical_pairs=st.integers(0, 2),
        dilation=st.integers(1, 30),
        gate_init=st.one_of(st.floats(-3, 3), st.just(-math.inf)),
        nu_init=st.one_of(st.floats(-3, 3), st.tuples(st.floats(-3, 0), st.floats(0, 3))),
        theta_init=st.one_of(st.floats(0, math.pi), st.tuples(st.floats(-3, 0), st.floats(0, 3))),
        gate_per_head=st.booleans(),
        layers=st.one_of(st.none(), st.lists(st.integers(0, 9), min_size=1, unique=True).map(sorted)),
        causal=st.sampled_from([None, True, False]),
        parameter_scale=st.floats(0.1, 100),
        num_free_lags=st.integers(0, 8),
    )
)
def test_counts_survive_json(values):
    config = RSAConfig(**values)
    assert RSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


HEAD = {"layer": 3, "head": 2, "kind": "cos", "decay": 0.9, "gate": 0.1, "theta": 0.5, "dilation": 2}


def named_heads(size):
    places = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=size, unique=True)
    cyclical = st.tuples(st.sampled_from(["cos", "sin"]), st.floats(0.001, 0.999))
    rem = st.one_of(st.tuples(st.just("regular"), st.floats(-0.999, 0.999)), cyclical)
    others = st.tuples(st.floats(0, 1), st.floats(-4, 4), st.integers(1, 30))
    described = places.flatmap(
        lambda p: st.lists(st.tuples(rem, others), min_size=len(p), max_size=len(p)).map(lambda x: (p, x))
    )
    return described.map(lambda pair: [HeadConfig(*p, *r, *o) for p, (r, o) in zip(*pair, strict=True)])


@given(named_heads(6))
def test_named_heads_survive_json(heads):
    config = RSAConfig(heads=heads)
    assert RSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.layers == tuple(sorted({head.layer for head in heads}))
    specs = config.layer_specs([8] * len(config.layers))
    assert sum(len(spec.layout.rows) for spec in specs) == len(heads)
    for layer, spec in zip(config.layers, specs, strict=True):
        rates = {name: value.tolist() for name, value in RSAHeads(spec).rates(torch.float64).items()}
        places = list(zip(*columns(spec)[::2], strict=True))
        decay = [rates["lam" if kind == "regular" else "gamma"][rate] for kind, rate in places]
        theta = [0.0 if kind == "regular" else rates["theta"][rate] for kind, rate in places]
        of_layer = sorted((head for head in heads if head.layer == layer), key=lambda head: head.head)
        assert spec.layout.heads == tuple(head.head for head in of_layer)
        assert decay == pytest.approx([head.decay for head in of_layer], abs=1e-5)
        angles = [0 if head.kind == "regular" else head.theta for head in of_layer]
        assert theta == pytest.approx(angles, abs=1e-5)


def test_named_heads_may_share_a_rate_and_a_gate():
    shared = [("cos", 4), ("regular", 4), ("sin", None), ("sin", 4), ("cos", 0)]
    heads = [{**HEAD, "layer": 0, "head": i, "kind": kind, "pair": p} for i, (kind, p) in enumerate(shared)]
    (spec,) = RSAConfig(heads=heads, gate_per_head=False).layer_specs([8])
    assert columns(spec)[2] == (0, 0, 1, 0, 2)
    assert [len(start) for start in (spec.mu, spec.eta, spec.nu, spec.theta)] == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        # values that no field takes
        ({"dilation": 0}, "dilation=0: a whole number from 1"),
        ({"num_regular": True}, "num_regular=True"),
        ({"gate_init": math.nan}, "gate_init=nan"),
        ({"nu_init": -math.inf}, "nu_init=-inf"),
        ({"nu_init": (1,)}, "nu_init=.*two ends"),
        ({"causal": [1, 0]}, "causal=1"),
        ({"layers": [3, 1]}, r"layers=\[3, 1\].*ascending"),
        ({"parameter_scale": 1e-300}, "from 1e-06 to 1e\\+06"),
        ({"num_regulars": 2}, "num_regulars.*Did you mean 'num_regular'"),
        # named heads
        ({"heads": [{**HEAD, "head": 8}]}, "head=8: an index below 8, the heads of layer 3"),
        ({"heads": [HEAD, HEAD]}, "head 2 of layer 3 is named more than once"),
        ({"heads": [HEAD], "gate_init": 0.0}, "gate_init cannot be given"),
        ({"heads": [HEAD], "layers": [1]}, r"layers=\[1\].*the layers of the heads, \[3\]"),
        ({"heads": [{"layer": 1, "head": 0, "kind": "cos"}]}, "missing 2 required .* 'decay' and 'gate'"),
        ({"heads": [{**HEAD, "kind": "tan"}]}, "kind='tan': one of regular, cos, sin"),
        ({"heads": [{**HEAD, "decay": -0.5}]}, "decay=-0.5: a number between 0 and 1, for a cos head"),
        ({"heads": [{**HEAD, "gate": 1.5}]}, "gate=1.5: a number from 0 to 1"),
        # free lags
        ({"heads": [{**HEAD, "free_lags": [1.0]}], "num_free_lags": 2}, "free_lags=.*: None, or 2 numbers"),
        ({"num_free_lags": 9}, "num_free_lags=9: a whole number from 0 to 8"),
        # what does not fit a layer of 8 heads
        ({"num_cyclical_pairs": 5}, "layer 0 can have 1 to 8 RSA heads.*asks for 10"),
        ({"num_regular": 0}, "asks for 0"),
        ({"num_dilated_cyclical_pairs": 2, "dilation": [3, 6]}, r"dilation=\[3, 6\].*each of the 4 dilated heads"),
        ({"num_regular": 4, "dilation": 24}, "dilation=24"),
        ({"layers": [1, 2, 3]}, "layers="),
    ],
)
def test_what_is_not_allowed_is_an_error_that_names_it(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        RSAConfig.from_dict(values).layer_specs([8])


def test_counts_are_needed_where_the_number_of_heads_is_not_known():
    for config in (RSAConfig(), RSAConfig(num_regular=4096, num_cyclical_pairs=1)):
        with pytest.raises(ValueError, match="number of heads|1 to 4096"):
            config.layer_specs([None])
    with pytest.raises(ValueError, match="num_heads=0"):
        RSAConfig.from_scratch(0)


def test_a_shut_gate_can_be_written_as_a_string():
    assert RSAConfig.from_dict({"gate_init": "-inf"}).gate_init == -math.inf


# Plans in the words of earlier versions, for three layers, with the heads that those built: kinds, dilations, places of
# rates, and where μ started.
REGULAR, COS, SIN = "regular", "cos", "sin"
EARLIER = {
    "counts, dilations and gates per layer": (
        {"num_regular": [1, 0, 2], "num_cyclical_pairs": [0, 1, 0], "num_dilated_regular": [1, 2, 0],
         "dilation": [[2], [3, 4], []], "gate_init": [-1.0, 1.0], "tie_pairs": True},
        [
            ((REGULAR, REGULAR), (1, 2), (0, 1), [-1.0]),
            ((COS, SIN, REGULAR, REGULAR), (1, 1, 3, 4), (0, 0, 0, 1), [0.0]),
            ((REGULAR, REGULAR), (1, 1), (0, 1), [1.0]),
        ],
    ),
    "one dilation for the layers that have dilated heads": (
        {"num_regular": 1, "num_dilated_regular": [0, 1, 0], "dilation": 7, "gate_init": -2.0},
        [
            ((REGULAR,), (1,), (0,), [-2.0]),
            ((REGULAR, REGULAR), (1, 7), (0, 1), [-2.0]),
            ((REGULAR,), (1,), (0,), [-2.0]),
        ],
    ),
    "pairs that are not tied": (
        {"num_cyclical_pairs": 1, "num_dilated_cyclical_pairs": 1, "dilation": 3, "tie_pairs": False,
         "gate_per_head": True, "gate_init": 0.5},
        [((COS, SIN, COS, SIN), (1, 1, 3, 3), (0, 1, 2, 3), [0.5] * 4)] * 3,
    ),
}  # fmt: skip


def test_free_lags_are_part_of_a_plan_only_if_there_are_some():
    assert "num_free_lags" not in RSAConfig().to_dict()  # earlier versions do not know the word
    assert RSAConfig(num_free_lags=2).layer_specs([4]) != RSAConfig().layer_specs([4])
    with_lags = RSAConfig(heads=[{**HEAD, "free_lags": (1.0,)}])
    assert with_lags.num_free_lags == 1
    assert RSAConfig.from_dict(with_lags.to_dict()) == with_lags


@pytest.mark.parametrize("name", EARLIER)
def test_a_plan_of_an_earlier_version_is_converted(name):
    plan, expected = EARLIER[name]
    content = {"format_version": 1, "modules": ["a", "b", "c"], "plan": {**plan, "layers": [1, 2, 5], "causal": True}}
    saved = read_plan(content)
    assert saved.config.layers == (1, 2, 5)
    assert read_plan(json.loads(json.dumps(write_plan(saved)))) == saved
    for layer, (kinds, dilations, rates, mu) in zip(saved.layers.values(), expected, strict=True):
        assert (*columns(layer), layer.causal) == (kinds, dilations, rates, True)
        assert layer.mu == pytest.approx(mu)
