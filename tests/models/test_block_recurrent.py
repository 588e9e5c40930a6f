"""The Block-Recurrent Transformer against loops over windows and tokens, and as a model of transformers."""

import json
import math

import pytest
import torch
from brt import VOCAB, WINDOW, build, config, in_segments, text
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from transformers.models.t5.modeling_t5 import T5Attention

from references import double_loop, relative_error
from rsa_hf import RSAConfig, is_patched, patch_model, unpatch_model
from rsa_hf.models.block_recurrent import BlockRecurrentConfig
from rsa_hf.models.block_recurrent.windows import distance_buckets

H, D = 8, 4


def rms(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def attend(query, keys, values, biases):
    """One query [H, D], keys and values of so many [H, D]: heads side by side [H · D]."""
    scores = [(query * k).sum(-1) / math.sqrt(D) + b for k, b in zip(keys, biases, strict=True)]
    weights = torch.stack(scores, -1).softmax(-1)
    return sum(weights[:, i, None] * v for i, v in enumerate(values)).flatten()


def tokens_see(module, query, key, value):
    """Attention of tokens to the last W tokens, of one row: query, key and value are lists of [H, D]."""
    # Classes of distances: 0, 1, 2 to 3 (2 · √3 = 3.5), and the rest.
    bias = [module.relative_bias.weight[min(i, 2 + (i > 3)) if i > 1 else i] for i in range(WINDOW)]
    heads = []
    for t in range(len(query)):
        seen = range(max(0, t - WINDOW + 1), t + 1)
        heads.append(attend(query[t], [key[s] for s in seen], [value[s] for s in seen], [bias[t - s] for s in seen]))
    return heads


def with_recurrence(rsa, heads, value):
    """RSA heads, by the double loop, with the window of attention."""
    T, plan, rates = len(heads), rsa.plan, rsa.rates(torch.float64)
    gate, R = rates["gate"], rsa.plan.num_rsa_heads
    decay, theta = rsa.per_head(rates)
    lags = torch.arange(T)[:, None] - torch.arange(T)
    visible = ((lags >= 0) & (lags < WINDOW))[None, None]
    V = torch.stack(value, 1)[None, :R]
    P_V = double_loop(V, plan.kinds, decay, theta, plan.dilations, T, 0, True, visible)[0]
    mixed = []
    for t, softmax in enumerate(heads):
        softmax = softmax.view(H, D)
        mixed.append(torch.cat([(1 - gate) * softmax[:R] + gate * P_V[:, t], softmax[R:]]).flatten())
    return mixed


def gated(gate, state, h, kind):
    if kind == "fixed":
        g = torch.sigmoid(gate.bias)
        return state * g + (gate.input.weight @ h + gate.input.bias) * (1 - g)
    W_i, W_f = gate.gates.weight.chunk(2)
    b_i, b_f = gate.gates.bias.chunk(2)
    i, f = torch.sigmoid(W_i @ h + b_i - 1), torch.sigmoid(W_f @ h + b_f + 1)
    return state * f + torch.tanh(gate.input.weight @ h + gate.input.bias) * i


def next_state(cell, state, h, kind):
    if cell.cell == "single":
        return gated(cell.ff_gate, state, torch.relu(cell.ff_in.weight @ h), kind)
    state = gated(cell.attn_gate, state, h, kind)
    if cell.cell == "skip":
        return state
    return gated(cell.ff_gate, state, torch.relu(cell.ff_in.weight @ rms(state, cell.ff_norm)), kind)


def recurrent_layer(module, x, kind, late):
    """One row's tokens [T] of [d_model], window by window; `late`: tokens see the states of the window before."""
    cell = module.states
    q, q_states, k, v = ([y.view(4, H, D)[i] for y in (module.qqkv_proj.weight @ e for e in x)] for i in range(4))
    heads = tokens_see(module, q, k, v)
    states = before = list(cell.initial_state)
    zero = torch.zeros(H, dtype=torch.float64)
    out = []
    for begin in range(0, len(x), WINDOW):
        end = min(begin + WINDOW, len(x))

        def projected(states):
            return [
                (cell.qqkv_proj.weight @ (rms(s, cell.norm) + i)).view(4, H, D)
                for s, i in zip(states, cell.state_ids, strict=True)
            ]

        p, seen = projected(states), projected(before if late else states)
        for t in range(begin, end):
            across = attend(q_states[t], [y[2] for y in seen], [y[3] for y in seen], [zero] * len(seen))
            out.append(module.o_proj.weight @ torch.cat([heads[t], across]))
        if end - begin < WINDOW:
            break
        near = range(max(0, begin - WINDOW), end)
        moved = []
        for s, y in zip(states, p, strict=True):
            own = attend(y[0], [z[2] for z in p], [z[3] for z in p], [zero] * len(p))
            tokens = attend(y[1], [k[t] for t in near], [v[t] for t in near], [zero] * len(near))
            moved.append(next_state(cell, s, torch.cat([own, tokens]), kind))
        before, states = states, moved
    return out


def written_out(model, row, late=False):
    """Logits of one row of tokens, in loops."""
    base = model.model
    hidden = [base.embed_tokens.weight[token] for token in row]
    for layer in base.layers:
        x = [rms(h, layer.attn_norm) for h in hidden]
        if hasattr(layer.attn, "states"):
            out = recurrent_layer(layer.attn, x, model.config.gate, late)
        else:
            q, k, v = ([(layer.attn.qkv_proj.weight @ e).view(3, H, D)[i] for e in x] for i in range(3))
            heads = tokens_see(layer.attn, q, k, v)
            if hasattr(layer.attn, "rsa"):
                heads = with_recurrence(layer.attn.rsa, heads, v)
            out = [layer.attn.o_proj.weight @ y for y in heads]
        hidden = [h + y for h, y in zip(hidden, out, strict=True)]
        hidden = [h + layer.ff_out.weight @ torch.relu(layer.ff_in.weight @ rms(h, layer.ff_norm)) for h in hidden]
    return torch.stack([model.lm_head.weight @ rms(h, base.norm) for h in hidden])


CASES = {
    "skip_fixed": ("skip", "fixed", None, "sdpa"),
    "single_lstm": ("single", "lstm", None, "eager"),
    "dual_fixed": ("dual", "fixed", {}, "sdpa"),
    "dual_lstm": ("dual", "lstm", {}, "eager"),
    "single_fixed": ("single", "fixed", {}, "sdpa"),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_loops_over_windows_and_tokens(case):
    """Logits and the gradient of every parameter, over two full windows and a part."""
    cell, gate, rsa, attention = CASES[case]
    model, row = build(attention, rsa, cell=cell, gate=gate).double(), text(batch=1, length=2 * WINDOW + 3)[0]
    weight = torch.randn(len(row), VOCAB, dtype=torch.float64)

    def values_and_gradients(logits):
        model.zero_grad()
        (logits * weight).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": logits.detach(), **gradients}

    found = values_and_gradients(model(row[None]).logits[0])
    expected = values_and_gradients(written_out(model, row))
    assert expected.keys() == found.keys()
    assert len(found) == 1 + len(list(model.parameters()))
    for name, value in expected.items():
        # Gates and rates are float32 at heart, and so are the weights of eager attention.
        assert relative_error(found[name], value) <= (1e-9 if rsa is None and attention == "sdpa" else 5e-6), name
    # States that come one window late are far off.
    assert relative_error(found["logits"], written_out(model, row, late=True).detach()) > 1e-3


def test_distances_have_the_classes_of_t5():
    distances = torch.arange(1500)
    for buckets, furthest in ((32, 128), (4, 6), (10, 100)):
        expected = T5Attention._relative_position_bucket(-distances, False, buckets, furthest)
        assert torch.equal(distance_buckets(distances, buckets, furthest), expected)
        assert expected.max() == buckets - 1


@torch.no_grad()
def test_states_carry_what_no_window_reaches():
    """The first token changes what comes long after it, with a recurrent layer alone."""
    tokens = text(batch=1, length=40)
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] - 3 + 1) % (VOCAB - 3) + 3
    reach = 3 * (WINDOW - 1)  # of three layers
    for places, far in (([], 0.0), ([-2], 1e-5)):
        model = build(recurrent_layers=places, n_layer=3)
        difference = (model(tokens).logits - model(changed).logits).abs()[0].amax(-1)
        assert float(difference[: reach + 1].min()) > 0 or places == []
        assert float(difference[0]) > 1e-2
        assert (float(difference[reach + 1 :].max()) > far) == (places != [])


def test_published_initialisation():
    model = build(gate="fixed", d_model=256, d_head=32, num_state_vectors=64)
    cell = model.model.layers[1].attn.states
    assert float(cell.attn_gate.bias.detach().std()) == pytest.approx(0.1, rel=0.2)
    assert float(cell.attn_gate.bias.detach().sigmoid().mean()) == pytest.approx(0.5, abs=0.02)
    assert float(cell.initial_state.detach().std()) == pytest.approx(0.1, rel=0.05)
    assert float(cell.state_ids.detach().std()) == pytest.approx(1.0, rel=0.05)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name.split(".")[-2].endswith(("_proj", "_in", "_out", "input")):
            # (Cut off at two standard deviations of the untruncated variable, or not at all.)
            assert float(parameter.detach().std()) == pytest.approx(parameter.shape[1] ** -0.5, rel=0.15), name
    gates = build(gate="lstm", d_model=256, d_head=32).model.layers[1].attn.states.attn_gate.gates
    assert float(gates.weight.detach().std()) == pytest.approx((0.1 / 512) ** 0.5, rel=0.15)
    assert float(gates.bias.detach().std()) == pytest.approx(0.1, rel=0.2)


def test_rsa_heads_go_on_all_layers_but_the_recurrent():
    model = build(n_layer=5, recurrent_layers=[0, 3])
    keys = set(model.state_dict())
    patch_model(model, RSAConfig(num_cyclical_pairs=2))
    assert model.config.rsa["modules"] == ["layers.1.attn", "layers.2.attn", "layers.4.attn"]
    assert not any(hasattr(model.model.layers[i].attn, "rsa") for i in (0, 3))
    assert set(unpatch_model(model).state_dict()) == keys
    # Indices count the layers that can be patched.
    patch_model(model, RSAConfig(num_cyclical_pairs=2, layers=[1]))
    assert model.config.rsa["modules"] == ["layers.2.attn"]
    unpatch_model(model)
    with pytest.raises(ValueError, match=r"layers=\[3\].*3 self-attention modules"):
        patch_model(model, RSAConfig(num_cyclical_pairs=2, layers=[3]))
    with pytest.raises(ValueError, match="no attention that can be patched"):
        patch_model(build(n_layer=1, recurrent_layers=[0]), RSAConfig(num_cyclical_pairs=2))
    with torch.device("meta"):
        patch_model(build(), RSAConfig(num_cyclical_pairs=2))


@pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
@torch.no_grad()
def test_save_and_load_through_auto_classes(rsa, gate, tmp_path):
    model, tokens = build(rsa=rsa, gate=gate, cell="dual"), text()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(in_segments(loaded, tokens, [7, 17]), in_segments(model, tokens, [7, 17]))
    assert is_patched(loaded) == (rsa is not None)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(tokens)[0], model.model(tokens)[0])
    assert torch.equal(
        AutoModelForSequenceClassification.from_pretrained(tmp_path).model(tokens)[0], model.model(tokens)[0]
    )
    assert isinstance(AutoConfig.from_pretrained(tmp_path), BlockRecurrentConfig)
    content = json.loads((tmp_path / "config.json").read_text())
    locks = [content.get("attn_implementation", ""), *content.get("fusion_config", {})]
    assert sum(lock.startswith("rsa_hf") for lock in locks) == (2 if rsa is not None else 0)


def test_outputs():
    base = AutoModel.from_config(config()).eval()
    out = base(text(length=12), output_hidden_states=True)
    assert [tuple(states.shape) for states in out.hidden_states] == [(2, 12, 32)] * 4
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    # A full window, the two tokens of the next, and the states of one layer.
    assert [tuple(memory.shape) for memory in out.mems] == [(2, 2, 8, 7, 4)] * 3 + [(2, 3, 32)]
    assert base(text(length=5), use_cache=False).mems is None
    model, tokens = build(), text()
    out = model(tokens, logits_to_keep=2, output_hidden_states=True)
    assert out.logits.shape == (2, 2, VOCAB)
    assert len(out.hidden_states) == 4
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    out = model(tokens, labels=labels)
    by_hand = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, by_hand)


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


@pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])
def test_gradient_checkpointing_changes_nothing(rsa):
    model, tokens = build(rsa=rsa).train(), text()
    mems = model(tokens).mems

    def gradients():
        model.zero_grad()
        model(tokens, mems=mems, labels=tokens).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable()
    again = gradients()
    assert plain.keys() == again.keys()
    for name, gradient in again.items():
        torch.testing.assert_close(gradient, plain[name])


@pytest.mark.parametrize("reentrant", [False, True])
def test_segments_under_gradient_checkpointing_have_graphs_of_their_own(reentrant):
    model, tokens, mems = build().train(), text(), None
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        out = model(tokens, mems=mems, labels=tokens)
        out.loss.backward()
        mems = out.mems
        assert not any(memory.requires_grad for memory in mems)


@torch.no_grad()
def test_bfloat16_stays_close():
    model, tokens = build(rsa={}), text()
    expected = model(tokens, mems=model(tokens).mems, labels=tokens)
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(tokens, mems=model(tokens).mems, labels=tokens)
    assert abs(float(cast.loss - expected.loss)) < 0.03 * float(expected.loss)
    model.to(torch.bfloat16)
    mems = model(tokens).mems
    assert {memory.dtype for memory in mems} == {torch.bfloat16}
    out = model(tokens, mems=mems, labels=tokens)
    assert abs(float(out.loss - expected.loss)) < 0.03 * float(expected.loss)


@pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])
def test_trainer_trains(rsa, tmp_path):
    """A periodic text is learned; evaluation gathers logits of batches and leaves the memory alone."""
    model = build(rsa=rsa, dropout=0.1, window_size=12)
    period = text(batch=1, length=5).repeat(1, 5)[0]
    data = [{"input_ids": period, "labels": period}] * 64
    arguments = TrainingArguments(
        tmp_path, max_steps=40, learning_rate=1e-2, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", seed=0, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 4
    assert trainer.predict(data[:6]).predictions.shape == (6, 25, VOCAB)
