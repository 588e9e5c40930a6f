"""A Temporal Latent Bottleneck with and without RSA heads learns bytes of Wikipedia, its state carried on."""

import lzma
import math
import statistics

import pytest
import torch

from rsa_hf import RSAConfig, param_groups, patch_model
from rsa_hf.models.temporal_latent_bottleneck import (
    TemporalLatentBottleneckConfig,
    TemporalLatentBottleneckForCausalLM,
)

BATCH, LENGTH, STEPS = 8, 64, 300
SEEDS = (0, 1, 2)


def rows(text, batch):
    """The text cut into as many consecutive pieces as the batch has rows: [batch, length of a piece]."""
    length = len(text) // batch
    return text[: batch * length].view(batch, length)


@torch.no_grad()
def bits_per_byte(model, text, length, carried=True):
    """Of a text, in segments behind the state of those before, or each on its own."""
    model.eval()
    pieces, logits, state = rows(text, 4), [], None
    for segment in pieces.split(length, dim=1):
        out = model(segment, state=state)
        logits.append(out.logits)
        state = out.state if carried else None
    predicted = torch.cat(logits, 1)[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(predicted, pieces[:, 1:].flatten())) / math.log(2)


def trained(text, seed, rsa):
    torch.manual_seed(seed)
    model = TemporalLatentBottleneckForCausalLM(
        TemporalLatentBottleneckConfig(
            vocab_size=256, hidden_size=64, num_attention_heads=8, num_hidden_layers=2, intermediate_size=128,
            chunk_size=16, num_states=8, cross_attention_every=1, dropout=0.0,
        )
    )  # fmt: skip
    if rsa:
        patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[1, 2, 1, 2], gate_init=0.0))
    optimizer = torch.optim.AdamW(param_groups(model, 3e-3))
    pieces, state = rows(text, BATCH), None
    for step in range(STEPS):
        segment = pieces[:, step * LENGTH : (step + 1) * LENGTH]
        out = model(segment, state=state, labels=segment)
        state = out.state
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_bytes_and_recurrence_does_no_harm(data_folder):
    content = lzma.decompress((data_folder / "enwik8" / "enwik8_prefix.xz").read_bytes())
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    train, test = text[:3_700_000], text[-12_000:]
    found = {}
    for rsa in (False, True):
        models = [trained(train, seed, rsa) for seed in SEEDS]
        found[rsa] = [bits_per_byte(model, test, LENGTH) for model in models]
        others = [bits_per_byte(model, test, 50) for model in models]
        alone = [bits_per_byte(model, test, LENGTH, carried=False) for model in models]
        print(rsa, found[rsa], others, alone)
        # The entropy of single bytes is about 5 bits.
        assert max(found[rsa]) < 4.05
        # Segments that end within chunks are the same text, and what came before the segment helps.
        assert others == pytest.approx(found[rsa], abs=1e-4)
        assert statistics.mean(found[rsa]) < statistics.mean(alone) - 0.01
    assert statistics.mean(found[True]) <= statistics.mean(found[False])
