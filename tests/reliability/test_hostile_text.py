"""Hundreds of hostile plans, run configs and lines of data: each is a short documented error or read correctly."""

import json

import pytest
import torch

from families import build
from model_state import assert_same_state, state_of
from reliability import hostile
from reliability.record import time_limit, try_many
from rsa_hf import RSAConfig, RSAHeads, is_patched, patch_model, unpatch_model
from rsa_hf.tasks.defect_data import DefectDataConfig, read_json_lines
from rsa_hf.training.arguments import ConfigError, read_run_config, read_yaml

HEADS = 8


def require_right(config):
    """Check that heads built from a plan are those that it asks for, and have finite rates."""
    assert RSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for i, plan in enumerate(config.layer_plans([HEADS, HEADS])):
        assert 1 <= plan.num_rsa_heads <= HEADS
        assert len(plan.dilations) == plan.num_rsa_heads
        for name, kind in (("regular", "regular"), ("cyclical_pairs", "cos"), ("cyclical_pairs", "sin")):
            asked = [getattr(config, count) for count in (f"num_{name}", f"num_dilated_{name}")]
            if any(count is not None for count in asked):
                assert plan.kinds.count(kind) == sum(count or 0 for count in asked)
        assert plan.causal == (config.causal[i] if isinstance(config.causal, tuple) else config.causal)
        rates = RSAHeads(plan).rates()
        assert not rates["gate"].isnan().any()
        assert all(bool(rates[name].isfinite().all()) for name in ("lam", "gamma", "theta"))
        torch.testing.assert_close(rates["gate"], torch.tensor(plan.mu).sigmoid(), rtol=1e-3, atol=1e-6)


def test_a_hostile_plan_is_refused_or_read_correctly():
    def case(random):
        plan = hostile.plan(random)
        config = RSAConfig.from_dict(plan if random.random() < 0.5 else read_yaml(hostile.spelled(random, plan)))
        require_right(config)

    outcomes = try_many("plans", case, (ValueError, TypeError))
    assert min(outcomes["right answer"], outcomes["refused: ValueError"], outcomes["refused: TypeError"]) > 20


def test_a_hostile_run_config_is_refused_or_read_correctly(tmp_path):
    path = tmp_path / "run.yaml"

    def case(random):
        path.write_text(hostile.run_config(random), encoding="utf-8", errors="surrogatepass")
        config = read_run_config([str(path)], DefectDataConfig)
        assert config.rsa is None or RSAConfig.from_dict(config.rsa.to_dict()) == config.rsa
        config.to_dict()

    outcomes = try_many("run configs", case, (ConfigError,))
    assert min(outcomes.values()) > 5
    assert len(outcomes) == 2


@pytest.mark.parametrize("text", hostile.ODD_YAML, ids=lambda text: text[:12].encode("unicode_escape").decode())
def test_odd_yaml_is_a_short_error(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with time_limit(), pytest.raises(ConfigError) as error:
        read_run_config([str(tmp_path / "run.yaml")], DefectDataConfig)
    assert len(str(error.value)) < 5000


def test_a_hostile_plan_leaves_no_model_half_patched():
    model = build("gpt2")
    before = state_of(model)

    def case(random):
        try:
            patch_model(model, hostile.plan(random))
        except Exception:
            assert_same_state(model, before)
            raise
        assert is_patched(model)
        unpatch_model(model)
        assert_same_state(model, before)

    outcomes = try_many("patches", case, (ValueError, TypeError))
    assert outcomes["right answer"] > 5


def test_a_hostile_line_of_data_is_refused_or_read_correctly(tmp_path):
    path = tmp_path / "lines.jsonl"

    def case(random):
        line = hostile.data_line(random)
        path.write_bytes(line)
        try:
            examples = read_json_lines(path)
        except ValueError as error:
            if f"{path}, line 1: " not in str(error):
                raise LookupError(f"the line is not named: {error}") from error
            raise
        if not line.strip():
            assert examples == []
            return
        (example,) = examples
        row = json.loads(line)
        assert (example.func, example.target) == (row["func"], row["target"])
        assert example.func.strip() and example.func.encode()
        assert type(example.target) is int

    outcomes = try_many("data lines", case, (ValueError,))
    assert min(outcomes["right answer"], outcomes["refused: ValueError"]) > 50


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"func": "\\ud800", "target": 0}', "surrogates not allowed"),
        (json.dumps({"func": " " * 10**6, "target": 0}).encode(), "is no labelled function"),
        (json.dumps({f"k{i}": 0 for i in range(10**5)}).encode(), "is no labelled function"),
    ],
)
def test_messages_about_data_lines_are_short(line, words, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=words) as error:
        read_json_lines(tmp_path / "x.jsonl")
    assert len(str(error.value)) < 2000
