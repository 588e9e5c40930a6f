"""Transformer-XL against transformers 4, loops and the published sizes; its memory."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from families import ATTENTIONS
from models import tiny
from models.tiny import BANDS, VOCAB, attention_by_hand, difference, in_segments, text, values_and_gradients
from references import relative_error
from rsa_hf import RSAConfig, patch_model
from rsa_hf.models.attention import sinusoids, visibility
from rsa_hf.models.transformer_xl import TransformerXLConfig

SCRIPT = Path(__file__).parents[2] / "scripts" / "transformer_xl_reference.py"
GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(GOLDEN.iterdir())
build = partial(tiny.build, "transfo-xl")


@pytest.mark.parametrize(
    ("layers", "plain", "rsa"), [(10, 34_139_675, 50), (14, 47_789_595, 70), (16, 54_614_555, 80)]
)
def test_sizes_are_the_published_ones(layers, plain, rsa):
    """The text8 models of the paper, plain and with two dilated cyclical pairs of RSA heads per layer."""
    shape = {"d_model": 512, "n_head": 8, "d_head": 64, "d_inner": 2048, "n_layer": layers, "vocab_size": 27}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            TransformerXLConfig(**shape, cutoffs=[], div_val=1, untie_r=False, mem_len=512, clamp_len=-1)
        )
        assert model.num_parameters() == plain
        patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[6, 6, 12, 12]))
    assert model.num_parameters() == plain + rsa


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
    """The golden numbers come from python scripts/transformer_xl_reference.py --output tests/models/golden."""
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


def write_cases(folder, seed):
    command = [sys.executable, str(SCRIPT), "--output", str(folder), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "pip" in done.stderr and "returned non-zero" in done.stderr:
        pytest.skip("needs a package index, once, to install transformers 4.57 in an environment of its own")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_checkpoints_agree_and_golden_numbers_are_reproduced(tmp_path):
    """By transformers 4.57 in an environment of its own."""
    write_cases(tmp_path / "other", 7)
    write_cases(tmp_path / "golden", 0)
    for case in CASES:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "other" / case.name).eval()
        expected = load_file(tmp_path / "other" / case.name / "expected.safetensors")
        for name, value in results_of_two_segments(model, expected).items():
            assert difference(value, expected[name]) <= 1e-5, (case.name, name)
        again, golden = (
            load_file(folder / case.name / "expected.safetensors") for folder in (tmp_path / "golden", GOLDEN)
        )
        assert again.keys() == golden.keys()
        for name in golden:
            # Processors round differently: two that were tried differ by 4e-6.
            assert difference(again[name].float(), golden[name].float()) <= 1e-5, (case.name, name)


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


# --- memory -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_memory_that_is_too_short_gives_other_logits():
    """The control for the tests of segments, whose memories are long enough."""
    model, tokens = build(mem_len=4, **BANDS), text()
    assert difference(in_segments(model, tokens, [5, 1, 11, 7]), model(tokens).logits) > 1e-3


@torch.no_grad()
def test_zero_memory_is_a_window_of_visible_zeros_before_the_text():
    """As in transformers 4, where a text with `same_length` starts with a memory of zeros."""
    model, tokens = build(rsa={}, mem_len=7, same_length=True, zero_memory=True), text()
    zeros = (torch.zeros(2, 7, 32),) * 2
    assert torch.equal(model(tokens, mems=zeros).logits, model(tokens).logits)
    model.config.zero_memory = False
    assert difference(model(tokens, mems=zeros).logits, model(tokens).logits) > 1e-3


@torch.no_grad()
def test_memory_grows_up_to_mem_len():
    model, tokens = build(mem_len=10), text()
    out = model(tokens[:, :6])
    assert {memory.shape[1] for memory in out.mems} == {6}
    states = model(tokens[:, :6], output_hidden_states=True).hidden_states
    assert torch.equal(out.mems[0], states[0])
    assert torch.equal(out.mems[1], states[1])
    out = model(tokens[:, 6:13], mems=out.mems)
    assert {memory.shape[1] for memory in out.mems} == {10}
    assert torch.equal(out.mems[0][:, :3], states[0][:, 3:])


@torch.no_grad()
def test_a_model_without_memory_generates():
    model, tokens = build(mem_len=0), text()
    assert model(tokens).mems is None
    options = {"max_new_tokens": 5, "num_beams": 3, "return_dict_in_generate": True}
    found = model.generate(tokens, **options)
    assert torch.equal(found.sequences, model.generate(tokens, **options, use_cache=False).sequences)
    assert found.past_key_values is None


def test_tokens_outside_the_vocabulary_of_bands_are_refused():
    for token in (VOCAB, -1):
        with pytest.raises(IndexError):
            build(**BANDS)(torch.tensor([[token]]))
