"""Transformer-XL against transformers 4 and against loops."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from families import ATTENTIONS
from models import tiny
from models.tiny import BANDS, VOCAB, attention_by_hand, difference, text, values_and_gradients
from references import relative_error
from rsa_hf.models.interface_attention import sinusoids, visibility

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(GOLDEN.iterdir())
build = partial(tiny.build, "transfo-xl")


def results_of_two_segments(model, expected):
    """The results that `scripts/transformer_xl_reference.py` stores, from this model."""
    found, mems = {}, None
    for i, segment in enumerate(expected["tokens"]):
        model.zero_grad()
        out = model(segment, mems=mems, labels=segment)
        out.loss.backward()
        mems = out.mems
        found[f"loss.{i}"], found[f"logits.{i}"] = out.loss.detach(), out.logits.detach()
        found[f"mems.{i}"] = torch.stack(mems)
        found[f"gradient.{i}"] = model.transformer.layers[0].dec_attn.qkv_net.weight.grad.clone()
    return found


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_agrees_with_transformers_4(case, attention):
    """The golden numbers come from scripts/transformer_xl_reference.py, run with transformers 4.57."""
    model = AutoModelForCausalLM.from_pretrained(case, attn_implementation=attention).eval()
    expected = load_file(case / "expected.safetensors")
    found = results_of_two_segments(model, expected)
    for name, value in found.items():
        assert float((value - expected[name]).abs().max()) <= 1e-5, name
    if case.name == "clamped":
        assert expected["tokens"].shape[2] > model.config.clamp_len > 0
        model.config.clamp_len = -1
        assert difference(results_of_two_segments(model, expected)["logits.1"], expected["logits.1"]) > 1e-2
    # The control: without the zeros that transformers 4 puts before a text, the first segment differs.
    model.config.zero_memory = False
    assert difference(results_of_two_segments(model, expected)["logits.0"], expected["logits.0"]) > 1e-2


def test_training_mode_gives_the_same_loss_without_all_logits():
    model, tokens = build(**BANDS), text()
    expected = model(tokens, labels=tokens)
    found = model.train()(tokens, labels=tokens)
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.logits is None
    assert expected.logits.shape == (2, 24, VOCAB)
    assert build().train()(tokens, labels=tokens).logits is not None


def written_out(module, hidden, memory, window, clamp):
    """One layer's attention as in the paper, as loops over rows, queries and keys."""
    D, n, outputs = module.config.d_head, module.config.d_model, []
    wavelengths = [10000 ** (-i / n) for i in range(0, n, 2)]
    for row, before in zip(hidden, memory, strict=True):
        M, S = len(before), len(before) + len(row)
        q, k, v = module.qkv_net(torch.cat([before, row])).unflatten(-1, (3, -1, D)).unbind(1)

        def position_bias(t, s, M=M, q=q):
            angles = [min(M + t - s, clamp) * w for w in wavelengths]
            R = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
            r = module.r_net(R).unflatten(-1, (-1, D))
            return ((q[M + t] + module.r_r_bias) * r).sum(-1) / math.sqrt(D)

        sees = lambda t, M=M, S=S: range(max(0, M + t - (window or S) + 1), M + t + 1)  # noqa: E731
        outputs.append(attention_by_hand(module, q[M:] + module.r_w_bias, k, v, sees, position_bias))
    return module.layer_norm(hidden + module.o_net(torch.stack(outputs)))


@pytest.mark.parametrize("clamp", [100, 3])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_layer_agrees_with_the_papers_equation(attention, window, clamp):
    """Values and gradients, with a memory and an odd length."""
    module = build(attention, rsa={}).transformer.layers[0].dec_attn
    hidden, memory = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 4, 32)
    positions = sinusoids(torch.arange(11, -1, -1).clamp(max=clamp), 32)
    visible = visibility(7, 4, window, None, torch.device("cpu"))
    found = values_and_gradients(module, module(hidden, memory, positions, visible, None)[0], hidden=hidden)
    expected = values_and_gradients(module, written_out(module, hidden, memory, window, clamp), hidden=hidden)
    assert expected.keys() >= {"rsa.mu", "rsa.eta", "rsa.nu", "rsa.theta", "r_w_bias", "r_r_bias", "r_net.weight"}
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 1e-5, name
    # The control: a memory that is one token too short.
    assert relative_error(found["output"], written_out(module, hidden, memory[:, :-1], window, clamp).detach()) > 1e-2
