"""Transformer-XL against formulas, loops, other softmaxes, and the published sizes."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from xl import BANDS, VOCAB, build, results_of_two_segments, text

from families import ATTENTIONS
from models.tiny import values_and_gradients
from references import double_loop, relative_error
from rsa_hf import RSAConfig, patch_model
from rsa_hf.models.attention import sinusoids, visibility
from rsa_hf.models.transformer_xl import TransformerXLConfig
from rsa_hf.models.transformer_xl.modeling_transformer_xl import relative_scores

GOLDEN = sorted((Path(__file__).parent / "golden").iterdir())


@pytest.mark.parametrize(
    ("layers", "plain", "rsa"), [(10, 34_139_675, 50), (14, 47_789_595, 70), (16, 54_614_555, 80)]
)
def test_published_sizes(layers, plain, rsa):
    """The text8 models of the paper, without and with 4 RSA heads in two dilated cyclical pairs a layer."""
    shape = {"d_model": 512, "n_head": 8, "d_head": 64, "d_inner": 2048, "n_layer": layers, "vocab_size": 27}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            TransformerXLConfig(**shape, cutoffs=[], div_val=1, untie_r=False, mem_len=512, clamp_len=-1)
        )
        assert model.num_parameters() == plain
        patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[6, 6, 12, 12]))
    assert model.num_parameters() == plain + rsa


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("case", GOLDEN, ids=lambda path: path.name)
def test_agrees_with_transformers_4(case, attention):
    """Golden numbers: python scripts/transformer_xl_reference.py --output tests/models/golden"""
    model = AutoModelForCausalLM.from_pretrained(case, attn_implementation=attention).eval()
    expected = load_file(case / "expected.safetensors")
    found = results_of_two_segments(model, expected)
    for name, value in found.items():
        assert float((value - expected[name]).abs().max()) <= 1e-5, name
    if case.name == "clamped":
        assert expected["tokens"].shape[2] > model.config.clamp_len > 0
        model.config.clamp_len = -1
        assert float((results_of_two_segments(model, expected)["logits.1"] - expected["logits.1"]).abs().max()) > 1e-2
    # The check can fail: without the zeros that transformers 4 begins with, the first segment differs.
    model.config.zero_memory = False
    assert float((results_of_two_segments(model, expected)["logits.0"] - expected["logits.0"]).abs().max()) > 1e-2


def test_training_mode_gives_the_same_loss_without_all_logits():
    model, tokens = build(**BANDS), text()
    expected = model(tokens, labels=tokens)
    found = model.train()(tokens, labels=tokens)
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.logits is None
    assert expected.logits.shape == (2, 24, VOCAB)
    assert build().train()(tokens, labels=tokens).logits is not None


@pytest.mark.parametrize("d_embed", [32, 20])
@pytest.mark.parametrize("div_val", [1, 2])
@pytest.mark.parametrize("cutoffs", [[], [9, 14, 20]])
def test_loss_is_the_cross_entropy_of_the_logits(cutoffs, div_val, d_embed):
    model, tokens = build(cutoffs=cutoffs, div_val=div_val, d_embed=d_embed), text()
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    out = model(tokens, labels=labels)
    torch.testing.assert_close(out.logits.exp().sum(-1), torch.ones(tokens.shape))
    by_hand = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, by_hand)
    # As Trainer divides where a batch is accumulated from several.
    in_all = model(tokens, labels=labels, num_items_in_batch=torch.tensor(100)).loss
    torch.testing.assert_close(in_all, by_hand * (labels[:, 1:] != -100).sum() / 100)


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("M", [0, 5])
def test_relative_scores_are_those_of_each_distance(T, M):
    B, H, D, S = 2, 3, 4, M + T
    query, position = torch.randn(B, H, T, D), torch.randn(H, S + 1, D)
    found = relative_scores(query, position)
    for t in range(T):
        for s in range(M + t + 1):
            r = position[:, S - (M + t - s)]  # row i holds the distance S − i
            torch.testing.assert_close(found[:, :, t, s], (query[:, :, t] * r).sum(-1))


def written_out(module, hidden, memory, window, clamp):
    """One layer's attention as the paper has it, in loops over queries and keys, with RSA heads by the double loop."""
    config, rsa = module.config, module.rsa
    B, T, _ = hidden.shape
    H, D = config.n_head, config.d_head
    both = torch.cat([memory, hidden], 1)
    M, S = memory.shape[1], both.shape[1]
    q, k, v = (x.view(B, S, H, D) for x in module.qkv_net(both).chunk(3, dim=-1))
    wavelengths = [10000 ** (-i / config.d_model) for i in range(0, config.d_model, 2)]
    heads = []
    plan, rates = rsa.plan, rsa.rates()
    decay, theta = rsa.per_head(rates)
    seen = torch.zeros(B, 1, T, S)
    for t in range(T):
        scores = []
        for s in range(max(0, M + t - (window or S) + 1), M + t + 1):
            angles = [min(M + t - s, clamp) * w for w in wavelengths]
            R = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
            r = module.r_net(R).view(H, D)
            query = q[:, M + t]
            score = ((query + module.r_w_bias) * k[:, s] + (query + module.r_r_bias) * r).sum(-1) / math.sqrt(D)
            scores.append((s, score))
            seen[:, :, t, s] = 1
        weights = torch.stack([score for _, score in scores], -1).softmax(-1)
        heads.append(sum(weights[..., i, None] * v[:, s] for i, (s, _) in enumerate(scores)))
    attention = torch.stack(heads, 1)
    R = plan.num_rsa_heads
    P_V = double_loop(v.transpose(1, 2)[:, :R], plan.kinds, decay, theta, plan.dilations, T, M, True, seen)
    gate = rates["gate"]
    mixed = torch.cat([(1 - gate) * attention[:, :, :R] + gate * P_V.transpose(1, 2), attention[:, :, R:]], 2)
    return module.layer_norm(hidden + module.o_net(mixed.reshape(B, T, -1)))


@pytest.mark.parametrize("clamp", [100, 3])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_layer_is_the_papers_equation(attention, window, clamp):
    """Values and gradients, of the weights and of gates and rates, with a memory and an odd length."""
    module = build(attention, rsa={}).transformer.layers[0].dec_attn
    hidden, memory = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 4, 32)
    positions = sinusoids(torch.arange(11, -1, -1).clamp(max=clamp), 32)
    visible = visibility(7, 4, window, None, torch.device("cpu"))
    found = values_and_gradients(module, module(hidden, memory, positions, visible, None)[0], hidden=hidden)
    expected = values_and_gradients(module, written_out(module, hidden, memory, window, clamp), hidden=hidden)
    assert expected.keys() >= {"rsa.mu", "rsa.eta", "rsa.nu", "rsa.theta", "r_w_bias", "r_r_bias", "r_net.weight"}
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 1e-5, name
    # A layer that had forgotten its memory's length is far off.
    assert relative_error(found["output"], written_out(module, hidden, memory[:, :-1], window, clamp).detach()) > 1e-2


@torch.no_grad()
def test_distances_beyond_clamp_len_are_clamped():
    assert sinusoids(torch.zeros(1), 32)[0].tolist() == [0.0] * 16 + [1.0] * 16
    model, tokens = build(clamp_len=6), text(length=9)
    clamped = model(tokens).logits
    model.config.clamp_len = -1
    unclamped = model(tokens).logits
    # The first queries are at most 6 positions from every key, so that nothing is clamped for them.
    torch.testing.assert_close(clamped[:, :7], unclamped[:, :7])
    assert float((clamped[:, 8] - unclamped[:, 8]).abs().max()) > 1e-3
