"""Transformer-XL with and without RSA heads learns bytes of Wikipedia, with memory carried from segment to segment."""

import statistics

import pytest
from learning import LENGTH, bits_per_byte, learned, require_learned, wikipedia

from rsa_hf.models.transformer_xl import TransformerXLConfig, TransformerXLForCausalLM


def make():
    return TransformerXLForCausalLM(
        TransformerXLConfig(
            vocab_size=256, cutoffs=[], div_val=1, d_model=64, n_head=8, d_head=8, d_inner=128, n_layer=2,
            mem_len=LENGTH, clamp_len=-1, same_length=False, dropout=0.0, eos_token_id=None,
        )
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_bytes_and_recurrence_does_no_harm(data_folder):
    train, test = wikipedia(data_folder)
    scores = {}
    for rsa, models in learned(make, train, 3e-3).items():
        scores[rsa] = [bits_per_byte(model, test) for model in models]
        for model in models:
            model.config.mem_len = 2 * LENGTH
        longer = [bits_per_byte(model, test, LENGTH // 2) for model in models]
        print(rsa, scores[rsa], longer)
        # A longer memory and other segments than in training are no worse.
        assert statistics.mean(longer) < statistics.mean(scores[rsa]) + 0.02
    require_learned(scores, 4.0)
