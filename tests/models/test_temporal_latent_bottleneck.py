"""Temporal Latent Bottleneck against loops; who sees whom; where RSA heads go; padding."""

from functools import partial

import pytest
import torch
from tlb import by_hand

from families import ATTENTIONS
from models import tiny
from models.tiny import CHUNK, VOCAB, run_segments, text, values_and_gradients
from references import relative_error
from rsa_hf.heads import RSAHeads
from rsa_hf.models.temporal_latent_bottleneck import modeling_temporal_latent_bottleneck as modeling

build = partial(tiny.build, "temporal_latent_bottleneck")
RSA = pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])


@RSA
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_agrees_with_loops(attention, rsa):
    """Over four chunks and a part of one, in float64."""
    model, tokens = build(attention, rsa).double(), text(length=23)
    expected = values_and_gradients(model, by_hand(model, tokens))
    found = values_and_gradients(model, model(tokens).logits)
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
    zero = lambda distances, n: sinusoids(distances, n) * (len(distances) == CHUNK)  # noqa: E731
    sinusoids = modeling.sinusoids
    monkeypatch.setattr(modeling, "sinusoids", zero)


def recurrence_is_off(monkeypatch):
    monkeypatch.setattr(RSAHeads, "forward", lambda self, attention, value, mask: attention)


@pytest.mark.parametrize("broken", [never_updated, sees_all_of_the_chunk, states_without_numbers, recurrence_is_off])
@torch.no_grad()
def test_a_broken_model_does_not_agree_with_loops(broken, monkeypatch):
    model, tokens = build(rsa={}).double(), text(length=23)
    expected = by_hand(model, tokens)
    broken(monkeypatch)
    assert relative_error(model(tokens).logits, expected) > 1e-2


@RSA
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_nobody_sees_what_comes_later(attention, rsa):
    """A token changes its own logits and those behind it, over chunks as well, and none before."""
    model, tokens = build(attention, rsa), text(1, 4 * CHUNK)
    expected = model(tokens).logits
    for t in (0, CHUNK - 1, CHUNK, 2 * CHUNK + 2):
        other = tokens.clone()
        other[:, t] = (other[:, t] + 1) % VOCAB
        changed = (model(other).logits - expected).abs().amax(-1)[0]
        assert float(changed[:t].max() if t else 0) <= 1e-6
        assert float(changed[t:].min()) > 1e-5


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


@RSA
@pytest.mark.parametrize("lengths", [[5, 15, 3], [2, 1, 1, 19]], ids=["chunks", "within"])
@torch.no_grad()
def test_segments_that_end_with_a_chunk_or_within_equal_one_long_text(rsa, lengths):
    model, tokens = build(rsa=rsa), text(length=23)
    whole = model(tokens)
    logits, state = run_segments(model, tokens, lengths)
    assert float((logits - whole.logits).abs().max()) <= 1e-5
    for found, expected in zip(state, whole.state, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def masks(length):
    """No, left, right padding, padding between, and nothing but padding."""
    mask = torch.ones(5, length, dtype=torch.long)
    mask[1, :4] = 0
    mask[2, 6:] = 0
    mask[3, [0, 3, 4, 9]] = 0
    mask[4] = 0
    return mask


@RSA
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_padding_anywhere_changes_nothing(rsa, attention):
    """Over three segments: behind the first, every row is at another place of its chunk."""
    model, tokens = build(attention, rsa), text(5, 31)
    mask = torch.cat([masks(12), masks(12).flip(0), torch.ones(5, 7, dtype=torch.long)], 1)
    found, state = [], None
    for segment in torch.arange(31).split([12, 12, 7]):
        out = model(tokens[:, segment], attention_mask=mask[:, : segment[-1] + 1], state=state)
        found.append(out.logits)
        state = out.state
    found = torch.cat(found, 1)
    for b in range(5):
        alone = model(tokens[b : b + 1, mask[b].bool()])
        torch.testing.assert_close(found[b, mask[b].bool()], alone.logits[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state[0][b], alone.state[0][0], atol=1e-5, rtol=1e-5)
        M = int(alone.state[3])
        assert int(state[3][b]) == M
        torch.testing.assert_close(state[1][b, :M], alone.state[1][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state[2][b, ..., :M, :], alone.state[2][0], atol=1e-5, rtol=1e-5)
    # The mask matters: with padding taken for tokens, chunks are others.
    assert float((model(tokens).logits - found)[1][mask[1].bool()].abs().max()) > 1e-2
    nothing = model(tokens[:, :3], attention_mask=torch.zeros(5, 3), state=state).state
    for part, before in zip(nothing, state, strict=True):
        torch.testing.assert_close(part, before)
