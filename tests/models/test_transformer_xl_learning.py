"""Transformer-XL with and without RSA heads learns bytes of Wikipedia, with memory carried from segment to segment."""

import lzma
import math
import statistics

import pytest
import torch

from rsa_hf import RSAConfig, param_groups, patch_model
from rsa_hf.models.transformer_xl import TransformerXLConfig, TransformerXLForCausalLM

BATCH, LENGTH, STEPS = 8, 64, 300
SEEDS = (0, 1, 2)


def rows(text, batch):
    """The text cut into as many consecutive pieces as the batch has rows: [batch, length of a piece]."""
    length = len(text) // batch
    return text[: batch * length].view(batch, length)


def bits_per_byte(model, text, length, mem_len):
    """Of a text, in segments with a memory that may be longer than in training."""
    model.eval()
    model.config.mem_len, trained = mem_len, model.config.mem_len
    nats, mems = 0.0, None
    pieces = rows(text, 4)
    with torch.no_grad():
        for start in range(0, pieces.shape[1] - length - 1, length):
            out = model(pieces[:, start : start + length], mems=mems)
            mems = out.mems
            targets = pieces[:, start + 1 : start + length + 1]
            nats += float(torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten()))
    model.config.mem_len = trained
    model.train()
    return nats / len(range(0, pieces.shape[1] - length - 1, length)) / math.log(2)


def trained(text, seed, rsa):
    torch.manual_seed(seed)
    model = TransformerXLForCausalLM(
        TransformerXLConfig(
            vocab_size=256, cutoffs=[], div_val=1, d_model=64, n_head=8, d_head=8, d_inner=128, n_layer=2,
            mem_len=LENGTH, clamp_len=-1, same_length=False, dropout=0.0, eos_token_id=None,
        )
    )  # fmt: skip
    if rsa:
        patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[1, 2, 1, 2], gate_init=0.0))
    optimizer = torch.optim.AdamW(param_groups(model, 3e-3))
    pieces, mems = rows(text, BATCH), None
    for step in range(STEPS):
        segment = pieces[:, step * LENGTH : (step + 1) * LENGTH]
        out = model(segment, mems=mems, labels=segment)
        mems = out.mems
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
        found[rsa] = [bits_per_byte(model, test, LENGTH, LENGTH) for model in models]
        longer = [bits_per_byte(model, test, LENGTH // 2, 2 * LENGTH) for model in models]
        print(rsa, found[rsa], longer)
        # The entropy of single bytes is about 5 bits.
        assert max(found[rsa]) < 4.0
        # A longer memory and other segments than in training are no worse.
        assert statistics.mean(longer) < statistics.mean(found[rsa]) + 0.02
    assert statistics.mean(found[True]) <= statistics.mean(found[False])
