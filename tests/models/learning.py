"""How tiny models learn bytes of Wikipedia in the slow tests, with what they carry going from segment to segment."""

import lzma
import math
import statistics

import torch

from rsa_hf import RSAConfig, param_groups, patch_model

BATCH, LENGTH, STEPS = 8, 64, 300
SEEDS = (0, 1, 2)


def wikipedia(data_folder):
    """Bytes to train on, and others to score."""
    content = lzma.decompress((data_folder / "enwik8" / "enwik8_prefix.xz").read_bytes())
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    return text[:3_700_000], text[-12_000:]


def rows(text, batch):
    """The text cut into as many consecutive pieces as the batch has rows: [batch, length of a piece]."""
    length = len(text) // batch
    return text[: batch * length].view(batch, length)


def learned(make, text, learning_rate):
    """Models that have learned a text, one for each seed: {False: plain ones, True: the same with RSA heads}.

    `make` builds one, from torch's generator.
    """
    models = {False: [], True: []}
    for rsa, found in models.items():
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = make()
            if rsa:
                patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[1, 2, 1, 2], gate_init=0.0))
            _train(model, text, learning_rate)
            found.append(model.eval())
    return models


def _train(model, text, learning_rate):
    optimizer = torch.optim.AdamW(param_groups(model, learning_rate))
    carried = None
    for segment in rows(text, BATCH)[:, : STEPS * LENGTH].split(LENGTH, dim=1):
        out = model(segment, labels=segment, **{model.segment_state: carried})
        carried = out[model.segment_state]
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def bits_per_byte(model, text, length=LENGTH, carry=True):
    """Of a text, in segments of this length, behind what those before hand on or each on its own."""
    pieces, logits, carried = rows(text, 4), [], None
    for segment in pieces.split(length, dim=1):
        out = model(segment, **{model.segment_state: carried})
        logits.append(out.logits)
        carried = out[model.segment_state] if carry else None
    predicted = torch.cat(logits, 1)[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(predicted, pieces[:, 1:].flatten())) / math.log(2)


def require_learned(scores, bound):
    """All below a bound (the entropy of single bytes is about 5 bits), and RSA does no harm."""
    assert max(scores[False] + scores[True]) < bound
    assert statistics.mean(scores[True]) <= statistics.mean(scores[False])
