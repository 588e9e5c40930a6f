"""The experiment `language-model`: memory during training, and the tokens of text8."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from experiments.language_model import ARCHITECTURES, build, train_on_segments
from rsa_hf import param_groups
from rsa_hf.tasks.text_blocks import TrainingTracks


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_carries_memory_until_the_end_of_the_text(architecture):
    """Against a training loop written out: 5 steps on streams of 2 segments."""
    streams = TrainingTracks(torch.randint(256, (2 * 2 * 64 + 5,)), 64, 2)
    assert streams.num_segments == 2

    def fresh():
        torch.manual_seed(1)
        return build(architecture, 256, "rsa").train()

    def by_hand(carry):
        model, mems = fresh(), None
        optimizer = torch.optim.AdamW(param_groups(model, 1e-2))
        schedule = get_cosine_schedule_with_warmup(optimizer, 1, 5)
        for step in range(5):
            begin = step % 2 * 64
            rows = torch.stack([streams.token_ids[stream * 128 + begin :][:65] for stream in range(2)])
            out = model(rows[:, :-1], mems=mems if step % 2 and carry else None)
            mems = out.mems
            torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model = fresh()
    train_on_segments(model, streams, 1e-2, 5)
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(found, by_hand(carry=True), rtol=1e-4, atol=1e-5)
    assert float((found - by_hand(carry=False)).abs().max()) > 1e-3
