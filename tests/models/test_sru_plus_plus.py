"""SRU++: against loops written from the paper, over segments, behind padding, in generation, with and without RSA."""

import math

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

from broken import break_mask, forgets_the_offset
from families import ATTENTIONS, FULL_PLAN
from references import double_loop, relative_error
from rsa_hf import RSAConfig, patch_model, unpatch_model
from rsa_hf.models.recurrent.modeling import RecurrentPreTrainedModel
from rsa_hf.models.sru_plus_plus import (
    SRUPlusPlusConfig,
    SRUPlusPlusForCausalLM,
    SRUPlusPlusForSequenceClassification,
    SRUPlusPlusModel,
)
from rsa_hf.models.sru_plus_plus.modeling import SRUPlusPlusPreTrainedModel
from rsa_hf.models.sru_plus_plus.recurrence import cells
from rsa_hf.models.transformer_xl.modeling import TransformerXLPreTrainedModel

VOCAB, D, SMALL, HEADS = 23, 12, 16, 8
RSA = [None, {}]
RSA_IDS = ["plain", "rsa"]
SPLITS = {"halves": [12, 12], "odd": [5, 1, 11, 7], "tokens": [1] * 24}


def config(**changes):
    tiny = {
        "vocab_size": VOCAB,
        "hidden_size": D,
        "projection_size": SMALL,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "mem_len": 40,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return SRUPlusPlusConfig(**{**tiny, **changes})


def build(model_class=SRUPlusPlusForCausalLM, attention="sdpa", rsa=None, **changes):
    """With attention at work, which a fresh model has not; `rsa`: settings beyond the full plan, {} for none."""
    model = model_class._from_config(config(**changes), attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("alpha"):
                parameter.fill_(1.5)
            elif "bias" in name or "layer_norm" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model if rsa is None else patch_model(model, RSAConfig(**{**FULL_PLAN, **rsa}))


def text(batch=2, length=24):
    return torch.randint(3, VOCAB, (batch, length))


def in_segments(model, tokens, lengths):
    logits, state = [], None
    for segment in tokens.split(lengths, dim=1):
        out = model(segment, state=state)
        logits.append(out.logits)
        state = out.state
    return torch.cat(logits, dim=1)


# --- the paper's equations -------------------------------------------------------------------------------------------


def by_hand(model, tokens, gate_sees_the_cell=True):
    """Every row, layer and step on its own: attention in a loop over queries and keys, RSA by the double loop."""
    rows = []
    for row in tokens:
        inputs = list(model.embeddings(row))
        for layer in model.layers:
            inputs = recur_by_hand(layer, inputs, attend_by_hand(layer.attention, inputs), gate_sees_the_cell)
        rows.append(torch.stack(inputs))
    return torch.stack(rows)


def attend_by_hand(module, inputs):
    W_q, W_o = module.q_proj.weight, module.o_proj.weight
    W_k, W_v = module.kv_proj.weight.split(SMALL)
    H, T, width = module.config.num_attention_heads, len(inputs), SMALL // module.config.num_attention_heads
    Q = [W_q @ x for x in inputs]
    K, V = [W_k @ q for q in Q], [W_v @ q for q in Q]
    A = []
    for t in range(T):
        heads = []
        for h in range(H):
            part = slice(h * width, (h + 1) * width)
            weights = torch.stack([Q[t][part] @ K[s][part] / math.sqrt(width) for s in range(t + 1)]).softmax(0)
            heads.append(sum(weights[s] * V[s][part] for s in range(t + 1)))
        A.append(torch.stack(heads))
    A = torch.stack(A)
    if hasattr(module, "rsa"):
        plan, rates = module.rsa.plan, module.rsa.rates()
        decay, theta = module.rsa.per_head(rates)
        R = plan.num_rsa_heads
        value = torch.stack(V).view(T, H, width).transpose(0, 1)[None, :R]
        P_V = double_loop(value, plan.kinds, decay, theta, plan.dilations, T, 0, True)[0].transpose(0, 1)
        gate = rates["gate"]
        A = torch.cat([(1 - gate) * A[:, :R] + gate * P_V, A[:, R:]], dim=1)
    U = []
    for t in range(T):
        x = Q[t] + module.alpha * A[t].flatten()
        normal = (x - x.mean()) / (x.var(unbiased=False) + module.layer_norm.eps).sqrt()
        U.append(W_o @ (normal * module.layer_norm.weight + module.layer_norm.bias))
    return U


def recur_by_hand(layer, inputs, U, gate_sees_the_cell=True):
    c, outputs = torch.zeros_like(inputs[0]), []
    for x, u in zip(inputs, U, strict=True):
        u_f, u_r, u_c = u.split(D)
        seen = c if gate_sees_the_cell else 0 * c
        f = torch.sigmoid(u_f + layer.forget_weight * seen + layer.forget_bias)
        r = torch.sigmoid(u_r + layer.highway_weight * c + layer.highway_bias)
        c = f * c + (1 - f) * u_c
        outputs.append(r * c + (1 - r) * x)
    return outputs


def values_and_gradients(model, hidden):
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
    model.zero_grad()
    (hidden * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"output": hidden.detach(), **gradients}


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_agrees_with_steps_by_hand(length, attention, heads):
    model, tokens = build(SRUPlusPlusModel, attention, num_attention_heads=heads).double(), text(length=length)
    found = values_and_gradients(model, model(tokens).last_hidden_state)
    expected = values_and_gradients(model, by_hand(model, tokens))
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-10 * max(1.0, float(value.abs().max())), name
        assert length == 1 or bool(value.any()), name
    if length > 2:  # a forget gate that does not look at the cell is something else
        broken = by_hand(model, tokens, gate_sees_the_cell=False).detach()
        assert relative_error(found["output"], broken) > 1e-3


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_rsa_heads_mix_into_its_attention(attention):
    """Gates and rates are float32 in any model, and so is the agreement."""
    model, tokens = build(SRUPlusPlusModel, attention, rsa={}), text(length=9)
    found = values_and_gradients(model, model(tokens).last_hidden_state)
    expected = values_and_gradients(model, by_hand(model, tokens))
    assert sum(".rsa." in name for name in expected) == 8
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 1e-5, name
    assert relative_error(unpatch_model(model)(tokens).last_hidden_state, expected["output"]) > 1e-2


def test_gradients_of_the_cells():
    """Against numerical ones, in a step that stays as it is (an infinite gate), too."""
    forget, candidate = torch.randn(2, 5, 3).double(), torch.randn(2, 5, 3).double()
    arguments = [forget, candidate, torch.randn(3).double(), torch.randn(2, 3).double()]
    for argument in arguments:
        argument.requires_grad_()
    assert torch.autograd.gradcheck(cells, arguments)
    held = torch.tensor([0, 1, 0, 0, 1]).bool()[None, :, None]

    def with_held(forget, *others):
        return cells(forget.masked_fill(held, math.inf), *others)

    assert torch.autograd.gradcheck(with_held, arguments)
    found = with_held(*arguments)
    assert torch.equal(found[:, 1], found[:, 0])


@torch.no_grad()
def test_a_fresh_layer_is_a_recurrence_alone():
    """α = 0: tokens meet in the recurrence alone, whose weights are W_o and W_q in one; highway gates start low."""
    model = SRUPlusPlusModel(config())
    for layer in model.layers:
        assert layer.attention.alpha.tolist() == [0.0]
        assert set(layer.highway_bias.tolist()) == {-2.0}
        assert float(layer.forget_weight.abs().max()) <= 1
    hidden, visible = torch.randn(2, 5, D), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    attention = model.layers[0].attention
    alone = attention.o_proj(attention.layer_norm(attention.q_proj(hidden)))
    assert torch.equal(attention(hidden, None, visible)[0], alone)


# --- segments --------------------------------------------------------------------------------------------------------


def gap(model, tokens, lengths):
    return float((in_segments(model, tokens, lengths) - model(tokens).logits).abs().max())


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_segments_with_their_state_are_one_text(rsa, attention, lengths, monkeypatch):
    model, tokens = build(attention=attention, rsa=rsa, mem_len=24), text()
    assert gap(model, tokens, lengths) <= 1e-5
    forgetful = torch.cat([model(segment).logits for segment in tokens.split(lengths, dim=1)], dim=1)
    assert float((forgetful - model(tokens).logits).abs().max()) > 1e-2
    # A state without its cells, a shorter memory, and distances counted from each segment's start are all seen.
    outputs = model(tokens[:, :12])
    expected = model(tokens[:, 12:], state=outputs.state).logits
    no_cells = [torch.zeros_like(cell) for cell in outputs.state[:2]] + list(outputs.state[2:])
    assert float((model(tokens[:, 12:], state=no_cells).logits - expected).abs().max()) > 1e-2
    model.config.mem_len = 3
    assert gap(model, tokens, lengths) > 1e-3
    model.config.mem_len = 24
    if rsa is not None:
        break_mask(monkeypatch, forgets_the_offset)
        assert gap(model, tokens, lengths) > 1e-3


def test_no_gradient_reaches_the_segment_before():
    model, tokens = build(rsa={}), text()
    embedded = model.model.embeddings(tokens[:, :12]).detach().requires_grad_()
    state = model(inputs_embeds=embedded).state
    assert not any(part.requires_grad for part in state)
    model(tokens[:, 12:], state=state, labels=tokens[:, 12:]).loss.backward()
    assert embedded.grad is None
    assert all(bool(parameter.grad.any()) for parameter in model.parameters())


@torch.no_grad()
def test_the_state_holds_cells_and_the_last_inputs():
    model, tokens = build(mem_len=10), text()
    first = model(tokens[:, :6], output_hidden_states=True)
    assert [tuple(part.shape) for part in first.state] == [(2, D)] * 2 + [(2, 6, D)] * 2
    assert torch.equal(first.state[3], first.hidden_states[1])
    second = model(tokens[:, 6:13], state=first.state)
    assert torch.equal(second.state[2][:, :3], first.hidden_states[0][:, 3:])
    assert second.state[2].shape == (2, 10, D)
    none = build(mem_len=0)
    assert none(tokens).state[2].shape == (2, 0, D)
    assert none(tokens, state=none(tokens).state).logits.isfinite().all()
    assert none(tokens, use_cache=False).state is None


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (SRUPlusPlusPreTrainedModel, "state"),
        (RecurrentPreTrainedModel, "state"),
        (TransformerXLPreTrainedModel, "mems"),
    ],
)
def test_models_say_what_goes_from_segment_to_segment(base, name):
    assert base.segment_state == name
    assert name in base.config_class.keys_to_ignore_at_inference


# --- padding, generation, patching -----------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_padding_changes_nothing(rsa, attention):
    """On either side and, without RSA heads, whose distances it takes part in, between; values and state."""
    model, tokens = build(attention=attention, rsa=rsa), text(3, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, 7:] = 0
    if rsa is None:
        mask[2, [0, 4, 5, 11]] = 0
    outputs = model(tokens, attention_mask=mask)
    for b in range(3):
        real = mask[b].bool()
        alone = model(tokens[b : b + 1, real])
        torch.testing.assert_close(outputs.logits[b, real], alone.logits[0], rtol=1e-5, atol=1e-5)
        for layer in range(2):
            torch.testing.assert_close(outputs.state[layer][b], alone.state[layer][0], rtol=1e-5, atol=1e-5)
    assert float((model(tokens).logits - outputs.logits)[0, 5:].abs().max()) > 1e-2
    # The next segment's mask says what of the memory was padding.
    then = text(3, 5)
    longer = torch.cat([mask, torch.ones_like(then)], dim=1)
    behind = model(then, attention_mask=longer, state=outputs.state).logits
    alone = in_segments(model, torch.cat([tokens[:1, 5:], then[:1]], dim=1), [7, 5])[:, 7:]
    torch.testing.assert_close(behind[:1], alone, rtol=1e-5, atol=1e-5)
    unsaid = model(then, attention_mask=torch.ones_like(then), state=outputs.state).logits
    assert float((unsaid[:1] - alone).abs().max()) > 1e-3


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
def test_generation_is_that_of_the_uncached_model(rsa, options):
    model, tokens = build(rsa=rsa, pad_token_id=0), text(2, 9)
    tokens[0, :3], mask = 0, torch.ones_like(tokens)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    ways = [model.generate(tokens, attention_mask=mask, use_cache=use, **settings, **options) for use in (True, False)]
    assert torch.equal(ways[0].sequences, ways[1].sequences)
    for cached, uncached in zip(ways[0].scores, ways[1].scores, strict=True):
        torch.testing.assert_close(cached, uncached, rtol=1e-5, atol=1e-5)
    alone = model.generate(tokens[:1, 3:], **settings, **options).sequences
    assert torch.equal(ways[0].sequences[0, 3:], alone[0])


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_goes_on_from_a_state(use_cache):
    model, tokens = build(rsa={}), text()
    settings = {"max_new_tokens": 10, "do_sample": False, "use_cache": use_cache}
    whole = model.generate(tokens, **settings)[:, 24:]
    state = model(tokens[:, :15]).state
    assert torch.equal(model.generate(tokens[:, 15:], state=state, **settings)[:, 9:], whole)
    assert not torch.equal(model.generate(tokens[:, 15:], **settings)[:, 9:], whole)


@torch.no_grad()
def test_one_token_is_computed_a_step(monkeypatch):
    lengths, forward = [], SRUPlusPlusForCausalLM.forward

    def counting(self, input_ids=None, **keywords):
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **keywords)

    monkeypatch.setattr(SRUPlusPlusForCausalLM, "forward", counting)
    build().generate(text(length=9), max_new_tokens=6, do_sample=False)
    assert lengths == [9] + [1] * 5


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_a_shut_gate_is_the_plain_model_bit_for_bit(attention):
    model, tokens = build(attention=attention, mem_len=9), text()
    plain = in_segments(model, tokens, [5, 12, 7])
    patch_model(model, {**FULL_PLAN, "gate_init": float("-inf")})
    assert torch.equal(in_segments(model, tokens, [5, 12, 7]), plain)
    for layer in model.model.layers:
        layer.attention.rsa.mu.data.fill_(0.0)
    assert float((in_segments(model, tokens, [5, 12, 7]) - plain).abs().max()) > 1e-2


@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
def test_save_and_load_through_auto_classes(tmp_path, rsa):
    assert isinstance(AutoConfig.for_model("sru_plus_plus"), SRUPlusPlusConfig)
    tokens = text()
    for model_class, auto in (
        (SRUPlusPlusModel, AutoModel),
        (SRUPlusPlusForCausalLM, AutoModelForCausalLM),
        (SRUPlusPlusForSequenceClassification, AutoModelForSequenceClassification),
    ):
        model = build(model_class, rsa=rsa)
        model.save_pretrained(tmp_path / auto.__name__)
        loaded = auto.from_pretrained(tmp_path / auto.__name__)
        assert type(loaded) is model_class
        assert any(name.endswith("rsa.mu") for name in loaded.state_dict()) == (rsa is not None)
        assert torch.equal(loaded(tokens)[0], model(tokens)[0])


# --- as a transformers model -----------------------------------------------------------------------------------------


def test_loss_is_the_cross_entropy_of_the_logits():
    model, tokens = build(tie_word_embeddings=True), text()
    assert model.lm_head.weight is model.model.embeddings.weight
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    out = model(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    in_all = model(tokens, labels=labels, num_items_in_batch=torch.tensor(100)).loss
    torch.testing.assert_close(in_all, expected * (labels[:, 1:] != -100).sum() / 100)
    assert torch.equal(model(tokens, logits_to_keep=2).logits, out.logits[:, -2:])


def test_a_classifier_reads_the_last_token_that_is_no_padding():
    model, tokens = build(SRUPlusPlusForSequenceClassification, num_labels=3, pad_token_id=0), text(length=9)
    tokens[0, 6:] = 0
    alone = model.score(model.model(tokens[:1, :6]).last_hidden_state[0, -1])
    out = model(tokens, labels=torch.tensor([0, 2]))
    torch.testing.assert_close(out.logits[0], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(tokens, attention_mask=(tokens > 0).long()).logits, out.logits)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 2])))


@torch.no_grad()
def test_outputs():
    model, tokens = build(SRUPlusPlusModel, "eager"), text(length=5)
    out = model(tokens, output_hidden_states=True, output_attentions=True)
    assert [tuple(states.shape) for states in out.hidden_states] == [(2, 5, D)] * 3
    assert [tuple(weights.shape) for weights in out.attentions] == [(2, HEADS, 5, 5)] * 2
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, HEADS, 5))
    assert torch.equal(out.hidden_states[0], model.embeddings(tokens))
    assert torch.equal(model(inputs_embeds=model.embeddings(tokens)).last_hidden_state, out.last_hidden_state)
    last, state = model(tokens, return_dict=False)
    assert last.shape == (2, 5, D)
    assert len(state) == 4


@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
def test_gradient_checkpointing_changes_nothing(rsa):
    model, tokens = build(rsa=rsa).train(), text()
    state = model(tokens).state

    def gradients():
        model.zero_grad()
        model(tokens, state=state, labels=tokens).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name])


@torch.no_grad()
def test_bfloat16_keeps_its_cells_in_float32():
    model, tokens = build(rsa={}), text()
    expected = model(tokens, state=model(tokens).state, labels=tokens).loss
    model.to(torch.bfloat16)
    state = model(tokens).state
    assert [part.dtype for part in state] == [torch.float32] * 2 + [torch.bfloat16] * 2
    out = model(tokens, state=state, labels=tokens)
    assert out.logits.dtype == torch.bfloat16
    assert abs(float(out.loss - expected)) < 0.03 * float(expected)


@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
def test_trainer_trains(rsa, tmp_path):
    """A periodic text is learned; evaluation gathers logits of batches and leaves the state alone."""
    model = patch_model(SRUPlusPlusForCausalLM(config(dropout=0.1)), FULL_PLAN) if rsa == {} else build(dropout=0.1)
    period = text(batch=1, length=5).repeat(1, 5)[0]
    data = [{"input_ids": period, "labels": period}] * 64
    arguments = TrainingArguments(
        tmp_path, max_steps=60, learning_rate=3e-2, per_device_train_batch_size=8,
        report_to=[], save_strategy="no", seed=0, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 4
    assert trainer.predict(data[:6]).predictions.shape == (6, 25, VOCAB)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_state_that_does_not_fit():
    model, tokens = build(mem_len=6), text(length=4)
    cell, memory = torch.zeros(2, D), torch.zeros(2, 6, D)
    wrong = {
        r"state has 2 entries; 2 · 2 are needed": (cell, memory),
        r"state\[0\] has shape \(3, 12\); \[2, 12\]": (torch.zeros(3, D), cell, memory, memory),
        r"state\[0\] has shape \(2, 6, 12\)": (memory, memory, cell, cell),
        r"state\[2\] has shape \(6, 2, 12\); \[2, 2, 12\]": (cell, cell, *[memory.transpose(0, 1)] * 2),
        r"state\[3\] has shape \(2, 5, 12\); \[2, 6, 12\]": (cell, cell, memory, memory[:, 1:]),
        r"state\[1\] is torch.float64; torch.float32": (cell, cell.double(), memory, memory),
        r"state\[2\] is torch.bfloat16; torch.float32": (cell, cell, memory.bfloat16(), memory),
        r"holds 7 positions, but mem_len=6": (cell, cell, *[torch.zeros(2, 7, D)] * 2),
    }
    for message, state in wrong.items():
        with pytest.raises(ValueError, match=message):
            model(tokens, state=state)
    model(tokens, state=(cell, cell, memory, memory))


def test_input_that_does_not_fit():
    model = build()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"shape \(2, 0\).*at least one token"):
        model(text(length=0))
    for mask in (torch.ones(2, 3), torch.ones(3, 4)):
        with pytest.raises(ValueError, match=r"shape \(2, 4\) with an attention_mask of shape.*\[batch, T or more\]"):
            model(text(length=4), attention_mask=mask)
    with pytest.raises(ValueError, match="has 1 attention heads.*6 RSA heads"):
        patch_model(build(num_attention_heads=1), FULL_PLAN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_attention_heads": 3}, "projection_size=16: a multiple of num_attention_heads=3"),
        ({"mem_len": -1}, "mem_len=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
