"""The Block-Recurrent Transformer with and without RSA heads learns bytes of Wikipedia, its memory carried along."""

import pytest
from learning import LENGTH, bits_per_byte, learned, require_learned, wikipedia

from rsa_hf.models.block_recurrent import BlockRecurrentConfig, BlockRecurrentForCausalLM


def make():
    return BlockRecurrentForCausalLM(
        BlockRecurrentConfig(
            vocab_size=256, d_model=64, n_head=8, d_head=8, d_inner=128, n_layer=3, window_size=LENGTH // 2,
            recurrent_layers=[1], num_state_vectors=8, dropout=0.0, dropatt=0.0,
        )
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_bytes_and_recurrence_does_no_harm(data_folder):
    train, test = wikipedia(data_folder)
    scores = {}
    for rsa, models in learned(make, train, 3e-3).items():
        scores[rsa] = [bits_per_byte(model, test) for model in models]
        # Segments may end within windows: it is the same text.
        odd = [bits_per_byte(model, test, LENGTH - 3) for model in models]
        print(rsa, scores[rsa], odd)
        assert odd == pytest.approx(scores[rsa], abs=1e-4)
    require_learned(scores, 4.2)
