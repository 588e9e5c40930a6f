"""`python -m experiments blimp`: lm-eval's log-likelihoods of a small model, and what shut gates must not change."""

import math

import pytest
from transformers import AutoModelForCausalLM

from programs.test_commands import log_likelihood
from rsa_hf import RSAConfig, patch_model, unpatch_model


@pytest.mark.slow
def test_shut_gates_leave_every_log_likelihood(patched, tokenizer, data_folder):
    pytest.importorskip("lm_eval", reason="needs lm-eval: make programs")
    from experiments.pages import blimp

    pairs = blimp.read_pairs(data_folder / "blimp" / "blimp.jsonl.xz", limit=3)
    assert len(pairs) == 67
    pairs = {name: pairs[name] for name in ("adjunct_island", "npi_present_1")}
    model = unpatch_model(AutoModelForCausalLM.from_pretrained(patched))
    plain = blimp.score(model, tokenizer, pairs, batch_size=4)
    for name, some in pairs.items():
        expected = [
            [log_likelihood(model, tokenizer, pair[f"sentence_{kind}"]) for kind in ("good", "bad")] for pair in some
        ]
        assert plain[name]["log_likelihoods"] == [pytest.approx(pair, abs=1e-3) for pair in expected]
        assert plain[name]["right"] == [int(good > bad) for good, bad in expected]
    patch_model(model, RSAConfig(num_regular=1, gate_init=-math.inf))
    blimp.require_equal(plain, blimp.score(model, tokenizer, pairs, batch_size=4))
    patch_model(unpatch_model(model), RSAConfig(num_regular=1, gate_init=-9.0))  # nearly shut
    with pytest.raises(ValueError, match="shut gates change log-likelihoods of 2 paradigms, such as adjunct_island"):
        blimp.require_equal(plain, blimp.score(model, tokenizer, pairs, batch_size=4))
