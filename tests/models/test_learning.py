"""Each model learns a source whose next token depends on the last two, and learns it faster with RSA heads."""

import math
import statistics
from contextlib import nullcontext

import pytest
import torch

from models import tiny
from rsa_hf import RSAConfig, param_groups, patch_model
from survey.broken import BROKEN

SYMBOLS, LENGTH, STEPS, SEEDS = 8, 24, 100, (0, 1)
# The settings of each model, and the least gain of RSA heads in bits per token.
MODELS = {
    "transfo-xl": ({"init_std": 0.02, "proj_init_std": 0.01}, 0.1),
    "block-recurrent": ({"window_size": 12}, 0.06),
    "sru_plus_plus": ({}, 0.015),
    "temporal_latent_bottleneck": ({"initializer_range": 0.02, "chunk_size": 12}, 0.17),
}


def draw(rows, segments, seed):
    """Texts as pairs of a segment and its next tokens; one token in ten is random."""
    table = torch.randint(SYMBOLS, (SYMBOLS, SYMBOLS), generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SYMBOLS, (rows, segments * LENGTH + 1), generator=generator)
    follows = torch.rand(tokens.shape, generator=generator) < 0.9
    for t in range(2, tokens.shape[1]):
        tokens[:, t] = torch.where(follows[:, t], table[tokens[:, t - 1], tokens[:, t - 2]], tokens[:, t])
    tokens += 3  # no special token
    return list(zip(tokens[:, :-1].split(LENGTH, 1), tokens[:, 1:].split(LENGTH, 1), strict=True))


def run(model, segments, carry=True, optimizer=None):
    """Bits per token of a pass over the segments, which trains the model if there is an optimizer."""
    state, losses = None, []
    for tokens, following in segments:
        out = model(tokens, shift_labels=following.contiguous(), **{model.segment_state: state})
        state = out[model.segment_state] if carry else None
        losses.append(float(out.loss.detach()) / math.log(2))
        if optimizer is not None:
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return statistics.mean(losses)


def learn(name, rsa, broken=nullcontext):
    """Mean bits per token of held-out texts, with carried state and without it."""
    carried, alone = [], []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = tiny.build(name, **MODELS[name][0])
        if rsa:
            patch_model(model, RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_init=0.0))
        with broken():
            optimizer = torch.optim.AdamW(param_groups(model, 5e-3))
            run(model.train(), draw(16, STEPS, 1 + seed), optimizer=optimizer)
            with torch.no_grad():
                held_out = draw(16, 12, 100)
                carried.append(run(model.eval(), held_out))
                alone.append(run(model, held_out, carry=False))
    return statistics.mean(carried), statistics.mean(alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rsa_heads_and_carried_state_help_to_learn(name):
    plain, plain_alone = learn(name, rsa=False)
    rsa, rsa_alone = learn(name, rsa=True)
    late, _ = learn(name, rsa=True, broken=BROKEN["one step late"])
    margin = MODELS[name][1]
    assert plain < math.log2(SYMBOLS) / 2
    assert plain < plain_alone
    assert rsa < rsa_alone
    assert rsa < plain - margin
    assert late > plain - margin  # broken RSA is caught
