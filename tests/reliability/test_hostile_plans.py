"""Hostile plans: each is a short documented error or read correctly, and leaves a model whole."""

import json

from families import build
from model_state import assert_same_state, state_of
from reliability import hostile
from reliability.record import try_many
from rsa_hf import RSAConfig, RSAHeads, patch_model, unpatch_model


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
