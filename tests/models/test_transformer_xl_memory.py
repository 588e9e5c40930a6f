"""Memory: segments behind it are one long text, for attention and for the recurrence, in training and in generation."""

from dataclasses import replace

import pytest
import torch
from xl import BANDS, VOCAB, build, config, in_segments, text

from families import ATTENTIONS
from rsa_hf import patch_model
from rsa_hf.heads import RSAHeads
from rsa_hf.models.transformer_xl import TransformerXLForCausalLM

RSA = [None, {}]
RSA_IDS = ["plain", "rsa"]
SPLITS = {"halves": [12, 12], "odd": [5, 1, 11, 7], "tokens": [1] * 24}
# Where the architecture lets segments equal one long text: memory as long as the text, or a window as long as memory.
ENOUGH = {"memory": {"mem_len": 24}, "window": {"mem_len": 7, "same_length": True}}


def gap(model, tokens, lengths):
    return float((in_segments(model, tokens, lengths) - model(tokens).logits).abs().max())


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("enough", ENOUGH)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_segments_equal_one_long_text(rsa, attention, enough, lengths, monkeypatch):
    model, tokens = build(attention, rsa, **ENOUGH[enough], **BANDS), text()
    assert gap(model, tokens, lengths) <= 1e-5
    # With less memory, or with distances counted from the start of each segment, they do not.
    if enough == "memory":
        model.config.mem_len = 4
        assert gap(model, tokens, lengths) > 1e-3
        model.config.mem_len = 24
    if rsa is not None:
        forward = RSAHeads.forward

        def forgets_the_offset(self, attention, value, mask):
            position = None if mask.query_position is None else torch.zeros_like(mask.query_position)
            return forward(self, attention, value, replace(mask, query_offset=0, query_position=position))

        monkeypatch.setattr(RSAHeads, "forward", forgets_the_offset)
        assert gap(model, tokens, lengths) > 1e-3


@torch.no_grad()
def test_zeros_before_a_text_fill_its_window():
    """As transformers 4 begins a text: within a window of M positions, so many zeros are seen before it."""
    model, tokens = build(rsa={}, zero_memory=True, **ENOUGH["window"]), text()
    assert gap(model, tokens, [5, 1, 11, 7]) <= 1e-5
    zeros = torch.zeros(2, 7, 32)
    torch.testing.assert_close(model(tokens, mems=(zeros, zeros)).logits, model(tokens).logits, rtol=0, atol=0)
    model.config.zero_memory = False
    assert float((model(tokens, mems=(zeros, zeros)).logits - model(tokens).logits).abs().max()) > 1e-3


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_shut_gate_is_the_plain_model_bit_for_bit(attention):
    model, tokens = build(attention, mem_len=9, same_length=True), text()
    plain = in_segments(model, tokens, [5, 12, 7])
    patch_model(model, {"num_cyclical_pairs": 2, "gate_init": float("-inf")})
    assert torch.equal(in_segments(model, tokens, [5, 12, 7]), plain)
    for layer in model.transformer.layers:
        layer.dec_attn.rsa.mu.data.fill_(0.0)
    assert not torch.equal(in_segments(model, tokens, [5, 12, 7]), plain)


def test_no_gradient_reaches_the_segment_before():
    model, tokens = build(rsa={}), text()
    embedded = model.transformer.word_emb(tokens[:, :12]).detach().requires_grad_()
    mems = model(inputs_embeds=embedded).mems
    assert not any(memory.requires_grad for memory in mems)
    model(tokens[:, 12:], mems=mems, labels=tokens[:, 12:]).loss.backward()
    assert embedded.grad is None
    rsa = model.transformer.layers[0].dec_attn.rsa
    assert all(float(p.grad.abs().max()) > 0 for p in rsa.parameters())


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


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_left_padding_changes_nothing(rsa, attention):
    """Over two segments: the memory holds padding, and the mask of the whole text says where."""
    model, tokens = build(attention, rsa), text()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    first = model(tokens[:, :10], attention_mask=mask[:, :10])
    padded = model(tokens[:, 10:], attention_mask=mask, mems=first.mems).logits
    alone = in_segments(model, tokens[:1, 5:], [5, 14])[:, 5:]
    assert float((padded[:1] - alone).abs().max()) <= 1e-5
    # A mask of the segment alone takes the memory for real.
    seen = model(tokens[:, 10:], attention_mask=mask[:, 10:], mems=first.mems).logits
    assert float((seen[:1] - alone).abs().max()) > 1e-3


GENERATE = {"max_new_tokens": 11, "min_new_tokens": 11, "do_sample": False, "return_dict_in_generate": True}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("enough", [*ENOUGH, "zeros", "none"])
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_generate_with_and_without_memory(rsa, enough, beams):
    more = {"zeros": {**ENOUGH["window"], "zero_memory": True}, "none": {"mem_len": 0}}
    model, tokens = build(rsa=rsa, **{**ENOUGH, **more}[enough]), text(length=9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens * mask, "attention_mask": mask, "num_beams": beams, "output_scores": True}
    with_memory = model.generate(**inputs, **GENERATE)
    without = model.generate(**inputs, **GENERATE, use_cache=False)
    assert torch.equal(with_memory.sequences, without.sequences)
    for a, b in zip(with_memory.scores, without.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert (with_memory.past_key_values is None) == (enough == "none")


@torch.no_grad()
def test_one_token_is_computed_a_step(monkeypatch):
    lengths = []
    forward = TransformerXLForCausalLM.forward

    def counting(self, input_ids=None, **keywords):
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **keywords)

    monkeypatch.setattr(TransformerXLForCausalLM, "forward", counting)
    build().generate(text(length=9), **GENERATE)
    assert lengths == [9] + [1] * 10


@pytest.mark.parametrize("options", [{}, {"num_beams": 4, "num_return_sequences": 2}], ids=["greedy", "beams"])
@torch.no_grad()
def test_generate_goes_on_from_a_memory(options):
    model, tokens = build(rsa={}), text()
    whole = model.generate(tokens, **GENERATE, **options).sequences[:, 24:]
    mems = model(tokens[:, :15]).mems
    assert torch.equal(model.generate(tokens[:, 15:], mems=mems, **GENERATE, **options).sequences[:, 9:], whole)
    assert not torch.equal(model.generate(tokens[:, 15:], **GENERATE, **options).sequences[:, 9:], whole)


def test_memory_that_does_not_fit():
    model, tokens = build(mem_len=6), text(length=4)
    fitting = torch.zeros(2, 6, 32)
    wrong = {
        "3 entries": (fitting,) * 3,
        r"mems\[0\] has shape \(3, 6, 32\)": (fitting.new_zeros(3, 6, 32),) * 2,
        r"mems\[0\] has shape \(6, 2, 32\).*\[2, 2, 32\].*positions first": (fitting.transpose(0, 1),) * 2,
        r"mems\[1\] has shape \(2, 5, 32\)": (fitting, fitting[:, 1:]),
        r"mems\[0\] has shape \(2, 6\)": (fitting[:, :, 0],) * 2,
        r"mems\[0\] is torch.float64.*torch.float32": (fitting.double(),) * 2,
        r"hold 7 positions, but mem_len=6": (torch.zeros(2, 7, 32),) * 2,
    }
    for message, mems in wrong.items():
        with pytest.raises(ValueError, match=message):
            model(tokens, mems=mems)
    model(tokens, mems=(fitting,) * 2)


def test_input_that_does_not_fit():
    model = build(clamp_len=8)
    with pytest.raises(ValueError, match="9 tokens is longer than clamp_len=8"):
        model(text(length=9))
    model(text(length=8), mems=model(text(length=8)).mems)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    for bands in ({}, BANDS):
        for token in (VOCAB, -1):
            with pytest.raises(IndexError):
                build(**bands)(torch.tensor([[token]]))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"cutoffs=\[9, 9\].*increase", {"cutoffs": [9, 9]}),
        (r"cutoffs=\[12, 5\].*increase", {"cutoffs": [12, 5]}),
        (r"cutoffs=\[0, 5\].*between 0 and vocab_size=29", {"cutoffs": [0, 5]}),
        (r"cutoffs=\[29\].*between 0 and vocab_size=29", {"cutoffs": [29]}),
        ("div_val=8: band 3 has no width left of d_embed=32", {"cutoffs": [5, 9], "div_val": 8}),
        (r"tie_projs=\[True\]: one entry for each of the 2 bands", {"cutoffs": [5], "tie_projs": [True]}),
        ("d_model=31: an even number", {"d_model": 31}),
        ("n_head=0", {"n_head": 0}),
        ("mem_len=0.*same_length", {"mem_len": 0, "same_length": True}),
        ("mem_len=-1", {"mem_len": -1}),
        ("attn_type=2: only 0", {"attn_type": 2}),
        ("sample_softmax=64", {"sample_softmax": 64}),
    ],
)
def test_configs_that_do_not_fit(message, changes):
    with pytest.raises(ValueError, match=message):
        config(**changes)
