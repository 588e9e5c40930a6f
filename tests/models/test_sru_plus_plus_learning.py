"""SRU++ with and without RSA heads learns bytes of Wikipedia, with its state carried from segment to segment."""

import pytest
from learning import LENGTH, bits_per_byte, learned, require_learned, wikipedia

from rsa_hf.models.sru_plus_plus import SRUPlusPlusConfig, SRUPlusPlusForCausalLM


def make():
    return SRUPlusPlusForCausalLM(
        SRUPlusPlusConfig(
            vocab_size=256, hidden_size=96, projection_size=64, num_hidden_layers=2, num_attention_heads=8,
            mem_len=LENGTH, dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_bytes_and_recurrence_does_no_harm(data_folder):
    train, test = wikipedia(data_folder)
    scores = {}
    for rsa, models in learned(make, train, 5e-3).items():
        scores[rsa] = [bits_per_byte(model, test) for model in models]
        # Attention is at work by now in a layer of each, and RSA with it: α starts at 0.
        alphas = [max(float(layer.attention.alpha.detach().abs()) for layer in model.model.layers) for model in models]
        print(rsa, scores[rsa], alphas)
        assert min(alphas) > 1e-2
    require_learned(scores, 4.0)
