"""Models with and without RSA heads learn bytes of Wikipedia, their state carried from segment to segment."""

import lzma
import math
import statistics

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rsa_hf import RSAConfig, param_groups, patch_model

BATCH, LENGTH, STEPS = 8, 64, 300
SEEDS = (0, 1, 2)
_SHARED = {"vocab_size": 256, "dropout": 0.0, "eos_token_id": None}
_NARROW = {"d_model": 64, "n_head": 8, "d_head": 8, "d_inner": 128}
# Of each: its config, the learning rate, and the bits per byte to stay below (single bytes have about 5).
MODELS = {
    "transfo-xl": (
        {
            **_NARROW, "cutoffs": [], "div_val": 1, "n_layer": 2, "mem_len": LENGTH, "clamp_len": -1,
            "same_length": False,
        },
        3e-3,
        4.0,
    ),
    "block-recurrent": (
        {
            **_NARROW, "n_layer": 3, "window_size": LENGTH // 2, "recurrent_layers": [1], "num_state_vectors": 8,
            "dropatt": 0.0,
        },
        3e-3,
        4.2,
    ),
    "sru_plus_plus": (
        {
            "hidden_size": 96, "projection_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
            "mem_len": LENGTH, "attention_dropout": 0.0,
        },
        5e-3,
        4.0,
    ),
    "temporal_latent_bottleneck": (
        {
            "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "intermediate_size": 128,
            "chunk_size": 16, "num_states": 8, "cross_attention_every": 1,
        },
        3e-3,
        4.05,
    ),
}  # fmt: skip


def rows(text, batch):
    """The text cut into as many consecutive pieces as the batch has rows: [batch, length of a piece]."""
    length = len(text) // batch
    return text[: batch * length].view(batch, length)


def train(model, text, learning_rate):
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


def check_segments(name, models, scores, text):
    """What else holds of models that have learned, by the kind of model."""
    if name == "transfo-xl":
        # A longer memory and other segments than in training are no worse.
        for model in models:
            model.config.mem_len = 2 * LENGTH
        longer = [bits_per_byte(model, text, LENGTH // 2) for model in models]
        assert statistics.mean(longer) < statistics.mean(scores) + 0.02
    elif name == "sru_plus_plus":
        # Attention is at work by now in a layer of each, and RSA with it: α starts at 0.
        alphas = [max(float(layer.attention.alpha.detach().abs()) for layer in model.model.layers) for model in models]
        assert min(alphas) > 1e-2
    else:
        # Segments may end within windows or chunks: it is the same text.
        others = [bits_per_byte(model, text, LENGTH - 3) for model in models]
        assert others == pytest.approx(scores, abs=1e-4)
    if name == "temporal_latent_bottleneck":
        alone = [bits_per_byte(model, text, carry=False) for model in models]
        assert statistics.mean(scores) < statistics.mean(alone) - 0.01


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS)
def test_learns_bytes_and_recurrence_does_no_harm(name, data_folder):
    content = lzma.decompress((data_folder / "enwik8" / "enwik8_prefix.xz").read_bytes())
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    settings, learning_rate, bound = MODELS[name]
    scores = {}
    for rsa in (False, True):
        models = []
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**_SHARED, **settings}))
            if rsa:
                patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[1, 2, 1, 2], gate_init=0.0))
            train(model, text[:3_700_000], learning_rate)
            models.append(model.eval())
        scores[rsa] = [bits_per_byte(model, text[-12_000:]) for model in models]
        print(name, rsa, scores[rsa])
        check_segments(name, models, scores[rsa], text[-12_000:])
    assert max(scores[False] + scores[True]) < bound
    assert statistics.mean(scores[True]) <= statistics.mean(scores[False])
