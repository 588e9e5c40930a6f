"""A Temporal Latent Bottleneck with and without RSA heads learns bytes of Wikipedia, its state carried on."""

import statistics

import pytest
from learning import bits_per_byte, learned, require_learned, wikipedia

from rsa_hf.models.temporal_latent_bottleneck import (
    TemporalLatentBottleneckConfig,
    TemporalLatentBottleneckForCausalLM,
)


def make():
    return TemporalLatentBottleneckForCausalLM(
        TemporalLatentBottleneckConfig(
            vocab_size=256, hidden_size=64, num_attention_heads=8, num_hidden_layers=2, intermediate_size=128,
            chunk_size=16, num_states=8, cross_attention_every=1, dropout=0.0,
        )
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_bytes_and_recurrence_does_no_harm(data_folder):
    train, test = wikipedia(data_folder)
    scores = {}
    for rsa, models in learned(make, train, 3e-3).items():
        scores[rsa] = [bits_per_byte(model, test) for model in models]
        others = [bits_per_byte(model, test, 50) for model in models]
        alone = [bits_per_byte(model, test, carry=False) for model in models]
        print(rsa, scores[rsa], others, alone)
        # Segments that end within chunks are the same text, and what came before the segment helps.
        assert others == pytest.approx(scores[rsa], abs=1e-4)
        assert statistics.mean(scores[rsa]) < statistics.mean(alone) - 0.01
    require_learned(scores, 4.05)
