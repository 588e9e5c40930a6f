"""Transformer-XL's memory: its length, its window, the zeros before a text."""

import pytest
import torch
from xl import BANDS, VOCAB, build, in_segments, text

from families import ATTENTIONS

# Where the architecture lets segments equal one long text: memory as long as the text, or a window as long as memory.
ENOUGH = {"memory": {"mem_len": 24}, "window": {"mem_len": 7, "same_length": True}}


def gap(model, tokens, lengths):
    return float((in_segments(model, tokens, lengths) - model(tokens).logits).abs().max())


@pytest.mark.parametrize("rsa", [None, {}], ids=["plain", "rsa"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("enough", ENOUGH)
@torch.no_grad()
def test_segments_equal_one_long_text(enough, attention, rsa):
    model, tokens = build(attention, rsa, **ENOUGH[enough], **BANDS), text()
    assert gap(model, tokens, [5, 1, 11, 7]) <= 1e-5
    if enough == "memory":
        model.config.mem_len = 4
        assert gap(model, tokens, [5, 1, 11, 7]) > 1e-3


@torch.no_grad()
def test_zeros_before_a_text_fill_its_window():
    """As transformers 4 begins a text: within a window of M positions, so many zeros are seen before it."""
    model, tokens = build(rsa={}, zero_memory=True, **ENOUGH["window"]), text()
    assert gap(model, tokens, [5, 1, 11, 7]) <= 1e-5
    zeros = torch.zeros(2, 7, 32)
    torch.testing.assert_close(model(tokens, mems=(zeros, zeros)).logits, model(tokens).logits, rtol=0, atol=0)
    model.config.zero_memory = False
    assert float((model(tokens, mems=(zeros, zeros)).logits - model(tokens).logits).abs().max()) > 1e-3


@torch.no_grad()
def test_memory_grows_up_to_its_length():
    model, tokens = build(mem_len=10), text()
    out = model(tokens[:, :6])
    assert {memory.shape[1] for memory in out.mems} == {6}
    states = model(tokens[:, :6], output_hidden_states=True).hidden_states
    assert torch.equal(out.mems[0], states[0])
    assert torch.equal(out.mems[1], states[1])
    out = model(tokens[:, 6:13], mems=out.mems)
    assert {memory.shape[1] for memory in out.mems} == {10}
    assert torch.equal(out.mems[0][:, :3], states[0][:, 3:])
    assert build(mem_len=0)(tokens).mems is None


GENERATE = {"max_new_tokens": 11, "min_new_tokens": 11, "do_sample": False, "return_dict_in_generate": True}


@pytest.mark.parametrize("enough", ["window", "zeros", "none"])
@torch.no_grad()
def test_generate_with_and_without_memory(enough):
    more = {"zeros": {**ENOUGH["window"], "zero_memory": True}, "none": {"mem_len": 0}}
    model, tokens = build(rsa={}, **{**ENOUGH, **more}[enough]), text(length=9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens * mask, "attention_mask": mask, "num_beams": 3}
    with_memory = model.generate(**inputs, **GENERATE)
    without = model.generate(**inputs, **GENERATE, use_cache=False)
    assert torch.equal(with_memory.sequences, without.sequences)
    assert (with_memory.past_key_values is None) == (enough == "none")


def test_tokens_outside_the_vocabulary_of_bands_are_refused():
    for token in (VOCAB, -1):
        with pytest.raises(IndexError):
            build(**BANDS)(torch.tensor([[token]]))
