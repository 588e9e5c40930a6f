"""Hostile plans, run configs and lines of data: each is a short documented error or read correctly; none runs code."""

import json

import pytest
import yaml

from families import build
from model_state import assert_same_state, state_of
from reliability import hostile
from reliability.record import time_limit, try_many
from rsa_hf import RSAConfig, RSAHeads, patch_model, unpatch_model
from rsa_hf.tasks.data_files import json_lines
from rsa_hf.tasks.defect_data import DefectDataConfig, read_examples


def test_a_hostile_plan_is_refused_or_read_correctly():
    def case(random):
        config = RSAConfig.from_dict(hostile.plan(random))
        assert RSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    outcomes = try_many("plans", case, (ValueError, TypeError), fast=600, full=100_000)
    assert min(outcomes["right answer"], outcomes["refused: ValueError"], outcomes["refused: TypeError"]) > 20


def test_a_hostile_plan_leaves_no_model_half_patched():
    model = build("gpt2")
    before = state_of(model)

    def case(random):
        try:
            patch_model(model, hostile.plan(random))
        except Exception:
            assert_same_state(model, before)
            raise
        for heads in [module for module in model.modules() if isinstance(module, RSAHeads)]:
            rates = heads.rates()
            assert not rates.pop("gate").isnan().any()
            assert all(bool(rate.isfinite().all()) for rate in rates.values())
        unpatch_model(model)
        assert_same_state(model, before)

    outcomes = try_many("patches", case, (ValueError, TypeError), fast=100, full=5000)
    assert outcomes["right answer"] > 5


def test_a_hostile_line_of_data_is_refused_or_read_correctly(tmp_path):
    path = tmp_path / "lines.jsonl"

    def case(random):
        line = hostile.data_line(random)
        path.write_bytes(line)
        try:
            examples = read_examples(json_lines(path), DefectDataConfig())
        except ValueError as error:
            if f"{path}, line 1: " not in str(error):
                raise LookupError(f"the line is not named: {error}") from error
            raise
        rows = [json.loads(line)] if line.strip() else []
        assert [(example.func, example.target) for example in examples] == [
            (row["func"], row["target"]) for row in rows
        ]
        assert all(example.func.strip() and example.func.encode() for example in examples)
        assert all(type(example.target) is int for example in examples)

    outcomes = try_many("data lines", case, (ValueError,), fast=500, full=100_000)
    assert min(outcomes["right answer"], outcomes["refused: ValueError"]) > 50


LAUGHS = [f"{new}: &{new} [{', '.join(['*' + old] * 9)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True)]
MADE = "made_by_yaml"
YAML = {
    "code": f"a: !!python/object/apply:os.mkdir [{MADE}]",
    "a loop": "a: &a [*a]",
    "a billion laughs": "\n".join(["a: &a [1,1,1,1,1,1,1,1,1]", *LAUGHS]),
    "deep": "[" * 5000,
    "a vast number": "9" * 5000,
    "a date": "!!timestamp 2020-99-99",
    "a key": "? [a]\n: 1",
    "many keys": "{" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}",
    "a null byte": "\0",
}


@pytest.mark.parametrize("kind", YAML)
def test_a_hostile_run_config_is_a_short_error_and_runs_nothing(kind, run_rsa_hf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(YAML[kind])
    with time_limit():
        code, _, said = run_rsa_hf("train", "defect", tmp_path / "run.yaml")
    assert code == 2
    assert "error: " in said and "Traceback" not in said
    assert len(said) < 5000
    assert not (tmp_path / MADE).exists()
    if kind == "code":  # another loader would have run it
        yaml.unsafe_load(YAML[kind])
        assert (tmp_path / MADE).exists()
