"""The Block-Recurrent Transformer with and without RSA heads learns bytes of Wikipedia, its memory carried along."""

import lzma
import math
import statistics

import pytest
import torch

from rsa_hf import RSAConfig, param_groups, patch_model
from rsa_hf.models.block_recurrent import BlockRecurrentConfig, BlockRecurrentForCausalLM

BATCH, LENGTH, STEPS = 8, 64, 300
SEEDS = (0, 1, 2)


def rows(text, batch):
    """The text cut into as many consecutive pieces as the batch has rows: [batch, length of a piece]."""
    length = len(text) // batch
    return text[: batch * length].view(batch, length)


@torch.no_grad()
def bits_per_byte(model, text, length):
    """Of a text, in segments of this length."""
    model.eval()
    nats, count, mems = 0.0, 0, None
    pieces = rows(text, 4)
    for segment in pieces[:, : (pieces.shape[1] - 1) // length * length].split(length, dim=1):
        targets = pieces[:, count * length + 1 : (count + 1) * length + 1]
        out = model(segment, mems=mems)
        mems = out.mems
        nats += float(torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten()))
        count += 1
    return nats / count / math.log(2)


def trained(text, seed, rsa):
    torch.manual_seed(seed)
    model = BlockRecurrentForCausalLM(
        BlockRecurrentConfig(
            vocab_size=256, d_model=64, n_head=8, d_head=8, d_inner=128, n_layer=3, window_size=LENGTH // 2,
            recurrent_layers=[1], num_state_vectors=8, dropout=0.0, dropatt=0.0,
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
        found[rsa] = [bits_per_byte(model, test, LENGTH) for model in models]
        print(rsa, found[rsa])
        # The entropy of single bytes is about 5 bits.
        assert max(found[rsa]) < 4.2
        # Segments may end within windows: nothing changes but the last tokens, that fill no segment.
        odd = [bits_per_byte(model, test, LENGTH - 3) for model in models]
        assert statistics.mean(odd) == pytest.approx(statistics.mean(found[rsa]), abs=0.02)
    assert statistics.mean(found[True]) <= statistics.mean(found[False])
