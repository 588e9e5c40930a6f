"""Temporal Latent Bottleneck: against loops; who sees whom; loading; training; what is refused."""

import json

import pytest
import torch
from tlb import VOCAB, K, build, by_hand, config, in_segments, text
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from families import ATTENTIONS
from references import relative_error
from rsa_hf import is_patched, patch_model, unpatch_model
from rsa_hf.heads import RSAHeads
from rsa_hf.models.temporal_latent_bottleneck import TemporalLatentBottleneckConfig, modeling

RSA = pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])


def values_and_gradients(model, logits, weight):
    model.zero_grad()
    (logits * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


@RSA
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_agrees_with_loops(attention, rsa):
    """Over four chunks and a part of one, in float64."""
    model, tokens = build(attention, rsa).double(), text()
    weight = torch.randn(2, 23, VOCAB, dtype=torch.float64)
    expected = values_and_gradients(model, by_hand(model, tokens), weight)
    found = values_and_gradients(model, model(tokens).logits, weight)
    assert set(found) == set(expected)
    assert {"model.slow.attention.query.weight", "model.layers.1.cross.norm.weight"} < set(found)
    if rsa is not None:
        assert {f"model.layers.2.attention.rsa.{name}" for name in ("mu", "eta", "nu", "theta")} < set(found)
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 1e-5, name


def never_updated(monkeypatch):
    monkeypatch.setattr(modeling, "_of_rows", lambda chosen, new, old: old)


def sees_all_of_the_chunk(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "tril", lambda self, diagonal=0: self)


def states_without_numbers(monkeypatch):
    zero = lambda distances, n: sinusoids(distances, n) * (len(distances) == K)  # noqa: E731
    sinusoids = modeling.sinusoids
    monkeypatch.setattr(modeling, "sinusoids", zero)


def recurrence_is_off(monkeypatch):
    monkeypatch.setattr(RSAHeads, "forward", lambda self, attention, value, mask: attention)


@pytest.mark.parametrize("broken", [never_updated, sees_all_of_the_chunk, states_without_numbers, recurrence_is_off])
@torch.no_grad()
def test_a_broken_model_does_not_agree_with_loops(broken, monkeypatch):
    model, tokens = build(rsa={}).double(), text()
    expected = by_hand(model, tokens)
    broken(monkeypatch)
    assert relative_error(model(tokens).logits, expected) > 1e-2


@RSA
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_nobody_sees_what_comes_later(attention, rsa):
    """A token changes its own logits and those behind it, over chunks as well, and none before."""
    model, tokens = build(attention, rsa), text(1, 4 * K)
    expected = model(tokens).logits
    for t in (0, K - 1, K, 2 * K + 2):
        other = tokens.clone()
        other[:, t] = (other[:, t] + 1) % VOCAB
        changed = (model(other).logits - expected).abs().amax(-1)[0]
        assert float(changed[:t].max() if t else 0) <= 1e-6
        assert float(changed[t:].min()) > 1e-5


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_a_shut_gate_is_the_plain_model_bit_for_bit(attention):
    model, tokens = build(attention), text()
    plain = in_segments(model, tokens, [7, 16])[0]
    patch_model(model, {"num_cyclical_pairs": 2, "gate_init": float("-inf")})
    assert torch.equal(in_segments(model, tokens, [7, 16])[0], plain)
    for layer in model.model.layers:
        layer.attention.rsa.mu.fill_(0.0)
    assert float((in_segments(model, tokens, [7, 16])[0] - plain).abs().max()) > 1e-2
    assert torch.equal(in_segments(unpatch_model(model), tokens, [7, 16])[0], plain)


@pytest.mark.parametrize(
    ("chunk_size", "num_states"), [(2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (4, 3), (4, 4), (9, 4), (9, 9)]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_self_attention_is_patched_and_cross_attention_is_not(chunk_size, num_states, device):
    """Also where a chunk has as many tokens as there are states, or a trial run could be mistaken for that."""
    with torch.device(device):
        model = build(rsa={}, chunk_size=chunk_size, num_states=num_states)
    patched = {name for name, module in model.named_modules() if isinstance(module, RSAHeads)}
    assert patched == {f"model.layers.{i}.attention.rsa" for i in range(3)}


def test_auto_classes_and_outputs():
    assert isinstance(AutoConfig.for_model("temporal_latent_bottleneck"), TemporalLatentBottleneckConfig)
    base = build(auto=AutoModel)
    assert base.segment_state == "state"
    out = base(text(length=7), output_hidden_states=True)
    assert [tuple(states.shape) for states in out.hidden_states] == [(2, 7, 32)] * 4
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    assert [tuple(part.shape) for part in out.state] == [(2, 3, 32), (2, 2, 32), (2, 3, 2, 8, 2, 4), (2,)]
    last, state = base(text(length=7), return_dict=False)
    assert last.shape == (2, 7, 32)
    assert len(state) == 4
    assert base(text(length=7), use_cache=False).state is None
    model, tokens = build(), text()
    whole = model(tokens, labels=tokens)
    by_hand_loss = torch.nn.functional.cross_entropy(whole.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(whole.loss, by_hand_loss)
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, whole.logits[:, -2:])
    embedded = model.model.embeddings(tokens) * 32**0.5
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, whole.logits)


@RSA
@torch.no_grad()
def test_saved_and_loaded_it_gives_the_same_bits(rsa, tmp_path):
    model, tokens = build(rsa=rsa), text()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(in_segments(loaded, tokens, [7, 16])[0], in_segments(model, tokens, [7, 16])[0])
    assert loaded.lm_head.weight is loaded.model.embeddings.weight
    assert is_patched(loaded) == (rsa is not None)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(tokens)[0], model.model(tokens)[0])
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(classifier.model(tokens)[0], model.model(tokens)[0])
    content = json.loads((tmp_path / "config.json").read_text())
    locks = [content.get("attn_implementation", ""), *content.get("fusion_config", {})]
    assert sum(lock.startswith("rsa_hf") for lock in locks) == (2 if rsa is not None else 0)


def test_classification_reads_the_last_token_that_is_no_padding():
    model = build(auto=AutoModelForSequenceClassification, num_labels=3)
    tokens = text(length=9)
    alone = model(tokens[:1, :6]).logits
    tokens[0, 6:] = 0
    torch.testing.assert_close(model(tokens).logits[:1], alone)
    mask = (tokens != 0).long()
    out = model(tokens, attention_mask=mask, labels=torch.tensor([1, 2]))
    torch.testing.assert_close(out.logits[:1], alone)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, torch.tensor([1, 2])))
    # On the left, a token that looks like padding is none without a mask that says so.
    left = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens[:1, :6]], 1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    torch.testing.assert_close(model(left, attention_mask=mask).logits, alone)


@RSA
def test_gradient_checkpointing_changes_nothing(rsa):
    model, tokens = build(rsa=rsa).train(), text()
    state = model(tokens[:, :8]).state

    def gradients():
        model.zero_grad()
        model(tokens[:, 8:], state=state, labels=tokens[:, 8:]).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable()
    found = gradients()
    assert plain.keys() == found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain[name])


@torch.no_grad()
def test_bfloat16_stays_close():
    model, tokens = build(rsa={}), text()
    expected = model(tokens[:, 8:], state=model(tokens[:, :8]).state, labels=tokens[:, 8:]).loss
    model.to(torch.bfloat16)
    state = model(tokens[:, :8]).state
    assert {part.dtype for part in state} == {torch.bfloat16, torch.long}
    out = model(tokens[:, 8:], state=state, labels=tokens[:, 8:])
    assert out.logits.dtype == torch.bfloat16
    assert abs(float(out.loss - expected)) < 0.03 * float(expected)


@RSA
def test_trainer_trains(rsa, tmp_path):
    """A periodic text is learned; evaluation gathers logits of batches and leaves the state alone."""
    model = build(rsa=rsa, initializer_range=0.02, dropout=0.1)
    period = text(batch=1, length=6).repeat(1, 4)[0]
    data = [{"input_ids": period, "labels": period}] * 64
    arguments = TrainingArguments(
        tmp_path, max_steps=25, learning_rate=1e-2, per_device_train_batch_size=8, gradient_accumulation_steps=1,
        report_to=[], save_strategy="no", seed=0, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2
    assert trainer.predict(data[:6]).predictions.shape == (6, 24, VOCAB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 1}, "chunk_size=1"),
        ({"num_states": 0}, "num_states=0"),
        ({"hidden_size": 36}, "hidden_size=36"),
        ({"hidden_size": 33, "num_attention_heads": 3}, "even number"),
        ({"cross_attention_every": 4}, "never sees the states"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_inputs_that_do_not_fit_are_refused():
    model, tokens = build(), text()
    states, outputs, keys_values, filled = state = model(tokens).state
    wrong = {
        "has 3 entries": state[:3],
        r"shapes \[\(1, 3, 32\)": tuple(part[:1] for part in state),
        r"\(2, 2, 32\)": (states[:, :2], *state[1:]),
        r"\(2, 3, 2, 8, 2, 4\)": (states, outputs, keys_values[..., :2, :], filled),
        r"\[3, 4\] tokens in a chunk of which it holds 3": (*state[:3], torch.tensor([3, 4])),
        "float64": (states.double(), outputs.double(), keys_values.double(), filled),
    }
    for message, changed in wrong.items():
        with pytest.raises(ValueError, match=message):
            model(tokens, state=changed)
    with pytest.raises(ValueError, match="chunk_size=5"):
        model(tokens, state=build(chunk_size=9)(text(length=7)).state)
    with pytest.raises(ValueError, match="exactly one"):
        model.model()
    with pytest.raises(ValueError, match="exactly one"):
        model(tokens, inputs_embeds=torch.zeros(2, 23, 32))
    with pytest.raises(ValueError, match="0 tokens"):
        model(tokens[:, :0])
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 22\)"):
        model(tokens, attention_mask=torch.ones(2, 22))
