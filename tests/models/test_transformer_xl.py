"""Transformer-XL against formulas, loops, other softmaxes, and the published sizes."""

import math
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from xl import BANDS, VOCAB, build, config, results_of_two_segments, text

from families import ATTENTIONS
from references import double_loop, relative_error
from rsa_hf import RSAConfig, patch_model
from rsa_hf.models.transformer_xl import TransformerXLConfig
from rsa_hf.models.transformer_xl.attention import relative_scores, sinusoids, visibility

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
    from safetensors.torch import load_file

    model = AutoModelForCausalLM.from_pretrained(case, attn_implementation=attention).eval()
    expected = load_file(case / "expected.safetensors")
    found = results_of_two_segments(model, expected)
    for name, value in found.items():
        assert float((value - expected[name]).abs().max()) <= 1e-5, name
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


def written_out(module, hidden, memory, window):
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
            angles = [(M + t - s) * w for w in wavelengths]
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


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_layer_is_the_papers_equation(attention, window):
    """Values and gradients, of the weights and of gates and rates, with a memory and an odd length."""
    module = build(attention, rsa={}).transformer.layers[0].dec_attn
    hidden, memory = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 4, 32)
    positions = sinusoids(torch.arange(11, -1, -1), 32)
    visible = visibility(7, 4, window, None, torch.device("cpu"))
    weight = torch.randn(2, 7, 32)

    def values_and_gradients(output):
        module.zero_grad()
        hidden.grad = None
        (output * weight).sum().backward()
        of = {**dict(module.named_parameters()), "hidden": hidden}
        return {"output": output.detach(), **{name: p.grad.clone() for name, p in of.items() if p.grad is not None}}

    found = values_and_gradients(module(hidden, memory, positions, visible, None)[0])
    expected = values_and_gradients(written_out(module, hidden, memory, window))
    assert expected.keys() >= {"rsa.mu", "rsa.eta", "rsa.nu", "rsa.theta", "r_w_bias", "r_r_bias", "r_net.weight"}
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 1e-5, name
    # A layer that had forgotten its memory's length is far off.
    assert relative_error(found["output"], written_out(module, hidden, memory[:, :-1], window).detach()) > 1e-2


@torch.no_grad()
def test_clamped_distances_look_alike():
    assert sinusoids(torch.zeros(1), 32)[0].tolist() == [0.0] * 16 + [1.0] * 16
    model, tokens = build(clamp_len=6), text(length=6)
    out = model(tokens, mems=model(tokens).mems)
    model.config.clamp_len = -1
    unclamped = model(tokens, mems=model(tokens).mems)
    # The first query is at most 6 positions from every key, so that nothing is clamped for it.
    torch.testing.assert_close(out.logits[:, 0], unclamped.logits[:, 0])
    assert float((out.logits[:, -1] - unclamped.logits[:, -1]).abs().max()) > 1e-3


def test_classification_reads_the_last_token_that_is_no_padding():
    model = AutoModelForSequenceClassification.from_config(config(num_labels=3)).eval()
    tokens = text(length=9)
    alone = model(tokens[:1, :6]).logits
    tokens[0, 6:] = 0
    torch.testing.assert_close(model(tokens).logits[:1], alone)
    mask = (tokens != 0).long()
    out = model(tokens, attention_mask=mask, labels=torch.tensor([1, 2]))
    torch.testing.assert_close(out.logits[:1], alone)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, torch.tensor([1, 2])))


def test_auto_classes_and_outputs():
    assert isinstance(AutoConfig.for_model("transfo-xl"), TransformerXLConfig)
    base = AutoModel.from_config(config(), attn_implementation="eager").eval()
    out = base(text(length=5), output_hidden_states=True, output_attentions=True)
    assert [tuple(states.shape) for states in out.hidden_states] == [(2, 5, 32)] * 3
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    assert [tuple(weights.shape) for weights in out.attentions] == [(2, 8, 5, 5)] * 2
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 8, 5))
    last, mems = base(text(length=5), return_dict=False)
    assert last.shape == (2, 5, 32)
    assert [tuple(memory.shape) for memory in mems] == [(2, 5, 32)] * 2
    assert base(text(length=5), use_cache=False).mems is None


@pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])
def test_gradient_checkpointing_changes_nothing(rsa):
    model, tokens = build(rsa=rsa, **BANDS).train(), text()
    mems = model(tokens).mems

    def gradients():
        model.zero_grad()
        model(tokens, mems=mems, labels=tokens).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert plain.keys() == gradients().keys()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name])


@pytest.mark.parametrize("changes", [{}, BANDS], ids=["plain", "bands"])
@torch.no_grad()
def test_bfloat16_stays_close(changes):
    model, tokens = build(rsa={}, **changes), text()
    expected = model(tokens, mems=model(tokens).mems, labels=tokens)
    model.to(torch.bfloat16)
    mems = model(tokens).mems
    assert mems[0].dtype == torch.bfloat16
    out = model(tokens, mems=mems, labels=tokens)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    assert abs(float(out.loss - expected.loss)) < 0.03 * float(expected.loss)


@pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])
def test_trainer_trains(rsa, tmp_path):
    """A periodic text is learned; evaluation gathers logits of batches and leaves the memory alone."""
    model = build(rsa=rsa, init_std=0.02, dropout=0.1)
    period = text(batch=1, length=5).repeat(1, 5)[0]
    data = [{"input_ids": period, "labels": period}] * 64
    arguments = TrainingArguments(
        tmp_path, max_steps=60, learning_rate=1e-2, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", seed=0, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 4
    assert trainer.predict(data[:6]).predictions.shape == (6, 25, VOCAB)
