"""The state: segments behind it are one long text, cut anywhere, in any row, in training and in generation."""

import pytest
import torch
from tlb import VOCAB, K, build, in_segments, text

from broken import break_mask, forgets_the_offset
from families import ATTENTIONS
from rsa_hf.models.temporal_latent_bottleneck import TemporalLatentBottleneckForCausalLM, layers, modeling

RSA = pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])
SPLITS = {"chunks": [5, 15, 3], "odd": [7, 1, 2, 13], "tokens": [1] * 23, "within": [2, 1, 1, 19]}


@RSA
@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_segments_equal_one_long_text(rsa, attention, lengths):
    model, tokens = build(attention, rsa), text()
    whole = model(tokens)
    logits, state = in_segments(model, tokens, lengths)
    assert float((logits - whole.logits).abs().max()) <= 1e-5
    for found, expected in zip(state, whole.state, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def forgets_the_chunk(monkeypatch):
    monkeypatch.setattr(layers, "merged", lambda earlier, new, is_earlier: _behind_zeros(new, is_earlier))


def _behind_zeros(new, is_earlier):
    if is_earlier is None:
        return new
    return torch.nn.functional.pad(new, (0, 0, is_earlier.shape[1] - new.shape[-2], 0))


def forgets_the_states(monkeypatch):
    end = modeling.TemporalLatentBottleneckModel._end

    def forgetful(self, states, unfinished, filled):
        return end(self, torch.zeros_like(states), unfinished, filled)

    monkeypatch.setattr(modeling.TemporalLatentBottleneckModel, "_end", forgetful)


def forgets_outputs(monkeypatch):
    """What the fast stream made of the chunk's first tokens, which only the update of the states needs."""
    end = modeling.TemporalLatentBottleneckModel._end

    def forgetful(self, *args):
        states, outputs, *rest = end(self, *args)
        return (states, torch.zeros_like(outputs), *rest)

    monkeypatch.setattr(modeling.TemporalLatentBottleneckModel, "_end", forgetful)


def counts_lags_from_the_segment(monkeypatch):
    break_mask(monkeypatch, forgets_the_offset)


@pytest.mark.parametrize(
    "broken", [forgets_the_chunk, forgets_the_states, forgets_outputs, counts_lags_from_the_segment]
)
@torch.no_grad()
def test_a_broken_state_is_caught(broken, monkeypatch):
    model, tokens = build(rsa={}), text()
    expected = model(tokens).logits
    broken(monkeypatch)
    assert float((in_segments(model, tokens, SPLITS["odd"])[0] - expected).abs().max()) > 1e-3


def test_no_gradient_reaches_the_segment_before():
    model, tokens = build(rsa={}), text()
    embedded = model.model.embeddings(tokens[:, :12]).detach().requires_grad_()
    state = model(inputs_embeds=embedded).state
    assert not any(part.requires_grad for part in state)
    model(tokens[:, 12:], state=state, labels=tokens[:, 12:]).loss.backward()
    assert embedded.grad is None
    # Within a segment it goes through the states.
    assert all(float(p.grad.abs().max()) > 0 for p in model.model.slow.parameters())
    last = model(inputs_embeds=embedded).logits[:, 2 * K :].sum()
    assert float(torch.autograd.grad(last, embedded)[0][:, :K].abs().max()) > 0


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


GENERATE = {"max_new_tokens": 13, "min_new_tokens": 13, "do_sample": False, "return_dict_in_generate": True}


@RSA
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_generate_with_and_without_state(rsa, beams):
    """Over more than two chunks, with rows that are at other places of their chunks."""
    model, tokens = build(rsa=rsa), text(length=9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens * mask, "attention_mask": mask, "num_beams": beams, "output_scores": True}
    with_state = model.generate(**inputs, **GENERATE)
    without = model.generate(**inputs, **GENERATE, use_cache=False)
    assert torch.equal(with_state.sequences, without.sequences)
    for a, b in zip(with_state.scores, without.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    alone = model.generate(tokens[:1, 3:], num_beams=beams, **GENERATE)
    assert torch.equal(alone.sequences[0], with_state.sequences[0, 3:])


@torch.no_grad()
def test_one_token_is_computed_a_step(monkeypatch):
    lengths = []
    forward = TemporalLatentBottleneckForCausalLM.forward
    attend = layers.SelfAttention.forward

    def recording_attention(self, hidden, visible, *args):
        lengths.append(tuple(visible.shape[2:]))
        return attend(self, hidden, visible, *args)

    def recording(self, input_ids=None, **keywords):
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids, **keywords)

    model = build(num_hidden_layers=2)
    model.generate(text(length=7), **{**GENERATE, "max_new_tokens": 1, "min_new_tokens": 1})
    monkeypatch.setattr(layers.SelfAttention, "forward", recording_attention)
    monkeypatch.setattr(TemporalLatentBottleneckForCausalLM, "forward", recording)
    model.generate(text(length=7), **{**GENERATE, "max_new_tokens": 5, "min_new_tokens": 5})
    steps = [(1, 3), (1, 4), (1, 5), (1, 1)]
    assert lengths == [7, *[(5, 5)] * 2, *[(2, 2)] * 2, *(x for step in steps for x in [1, step, step])]


@torch.no_grad()
def test_generation_goes_on_from_a_state():
    model, tokens = build(rsa={}), text(length=19)
    expected = model.generate(tokens, **GENERATE).sequences
    state = model(tokens[:, :12]).state
    found = model.generate(tokens[:, 12:], state=state, **GENERATE).sequences
    assert torch.equal(found[:, 7:], expected[:, 19:])
    assert int(expected.max()) < VOCAB
    forgetful = model.generate(tokens[:, 12:], **GENERATE).sequences
    assert not torch.equal(forgetful[:, 7:], expected[:, 19:])
