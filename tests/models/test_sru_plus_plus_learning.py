"""SRU++ with and without RSA heads learns bytes of Wikipedia, with its state carried from segment to segment."""

import lzma
import math
import statistics

import pytest
import torch

from rsa_hf import RSAConfig, param_groups, patch_model
from rsa_hf.models.sru_plus_plus import SRUPlusPlusConfig, SRUPlusPlusForCausalLM

BATCH, LENGTH, STEPS = 8, 64, 300
SEEDS = (0, 1, 2)


def rows(text, batch):
    """The text cut into as many consecutive pieces as the batch has rows: [batch, length of a piece]."""
    length = len(text) // batch
    return text[: batch * length].view(batch, length)


@torch.no_grad()
def bits_per_byte(model, text):
    """Of a text, in segments that carry the state on."""
    model.eval()
    pieces, nats, state = rows(text, 4), [], None
    for start in range(0, pieces.shape[1] - LENGTH - 1, LENGTH):
        out = model(pieces[:, start : start + LENGTH], state=state)
        state = out.state
        targets = pieces[:, start + 1 : start + LENGTH + 1]
        nats.append(float(torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())))
    return statistics.mean(nats) / math.log(2)


def trained(text, seed, rsa):
    torch.manual_seed(seed)
    model = SRUPlusPlusForCausalLM(
        SRUPlusPlusConfig(
            vocab_size=256, hidden_size=96, projection_size=64, num_hidden_layers=2, num_attention_heads=8,
            mem_len=LENGTH, dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip
    if rsa:
        patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[1, 2, 1, 2], gate_init=0.0))
    optimizer = torch.optim.AdamW(param_groups(model, 5e-3))
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
        found[rsa] = [bits_per_byte(model, test) for model in models]
        # Attention is at work by now in a layer of each, and RSA with it: α starts at 0.
        alphas = [max(float(layer.attention.alpha.detach().abs()) for layer in model.model.layers) for model in models]
        print(rsa, found[rsa], alphas)
        assert min(alphas) > 1e-2
        # The entropy of single bytes is about 5 bits.
        assert max(found[rsa]) < 4.0
    assert statistics.mean(found[True]) <= statistics.mean(found[False])
