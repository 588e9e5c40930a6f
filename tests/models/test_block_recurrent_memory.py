"""Memory: a text in segments is one long text, for attention, states and recurrence; generation; what does not fit."""

import pytest
import torch
from brt import VOCAB, WINDOW, build, config, in_segments, text

from broken import break_mask, forgets_the_offset
from families import ATTENTIONS
from rsa_hf import patch_model
from rsa_hf.heads import RSAHeads
from rsa_hf.models.block_recurrent import BlockRecurrentForCausalLM

RSA = [None, {}]
RSA_IDS = ["plain", "rsa"]
SPLITS = {"windows": [5, 10, 5, 4], "odd": [7, 1, 11, 5], "tokens": [1] * 24}


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_segments_equal_one_long_text(rsa, attention, lengths, monkeypatch):
    model, tokens = build(attention, rsa, recurrent_layers=[1, 2], n_layer=4), text()
    whole = model(tokens).logits
    assert float((in_segments(model, tokens, lengths) - whole).abs().max()) <= 1e-5
    if rsa is not None:
        break_mask(monkeypatch, forgets_the_offset)
        assert float((in_segments(model, tokens, lengths) - whole).abs().max()) > 1e-3


@pytest.mark.parametrize("what", ["keys", "states"])
@torch.no_grad()
def test_each_part_of_the_memory_counts(what):
    model, tokens = build(), text()
    out = model(tokens[:, :10])
    expected = model(tokens).logits[:, 10:]
    caches, states = out.mems[:3], out.mems[3:]
    torch.testing.assert_close(model(tokens[:, 10:], mems=out.mems).logits, expected, atol=1e-5, rtol=0)
    if what == "keys":
        caches = [torch.zeros_like(cache) for cache in caches]
    else:
        states = [model.model.layers[1].attn.states.initial_state.expand(2, -1, -1)]
    found = model(tokens[:, 10:], mems=(*caches, *states)).logits
    assert float((found - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_the_recurrence_reaches_into_the_cache(attention, monkeypatch):
    """P has as many columns as there are keys: memory and tokens; and values of the memory count."""
    shapes = []
    forward = RSAHeads.forward

    def recording(self, attention, value, mask):
        shapes.append((mask.query_length, mask.key_length, value.shape[2]))
        return forward(self, attention, value, mask)

    monkeypatch.setattr(RSAHeads, "forward", recording)
    model, tokens = build(attention, {}), text()
    mems = model(tokens[:, :7]).mems
    shapes.clear()
    out = model(tokens[:, 7:9], mems=mems)
    assert shapes == [(2, 9, 9)] * 2  # two layers; a window, and two of the next
    shapes.clear()
    model(tokens[:, 9:13], mems=out.mems)
    assert shapes == [(1, 10, 10), (3, 8, 8)] * 2  # the end of one window, and the next
    # With the gate wide open there is nothing but the recurrence.
    rsa = model.model.layers[0].attn.rsa
    rsa.mu.fill_(1e3)
    cleared = [mems[0].clone(), *mems[1:]]
    cleared[0][:, 1, : rsa.plan.num_rsa_heads] = 0
    assert (
        float((model(tokens[:, 7:8], mems=cleared).logits - model(tokens[:, 7:8], mems=mems).logits).abs().max())
        > 1e-3
    )


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_a_shut_gate_is_the_plain_model_bit_for_bit(attention):
    model, tokens = build(attention), text()
    plain = in_segments(model, tokens, [5, 12, 7])
    patch_model(model, {"num_cyclical_pairs": 2, "gate_init": float("-inf")})
    assert torch.equal(in_segments(model, tokens, [5, 12, 7]), plain)
    for i in (0, 2):
        model.model.layers[i].attn.rsa.mu.fill_(0.0)
    assert not torch.equal(in_segments(model, tokens, [5, 12, 7]), plain)


def test_no_gradient_reaches_the_segment_before():
    model, tokens = build(rsa={}), text()
    embedded = model.model.embed_tokens(tokens[:, :12]).detach().requires_grad_()
    mems = model(inputs_embeds=embedded).mems
    assert not any(memory.requires_grad for memory in mems)
    model(tokens[:, 12:], mems=mems, labels=tokens[:, 12:]).loss.backward()
    assert embedded.grad is None
    # Within a segment it does, from window to window: the last token's logits through the states, too.
    model(inputs_embeds=embedded).logits[:, -1].sum().backward()
    assert float(embedded.grad[:, 0].abs().max()) > 0
    assert all(float(p.grad.abs().max()) > 0 for p in model.model.layers[0].attn.rsa.parameters())


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_padding_changes_nothing(rsa, attention):
    """In front of a text in multiples of a window, over two segments; behind it in any number."""
    model, tokens = build(attention, rsa), text()
    mask = torch.ones_like(tokens)
    mask[0, : 2 * WINDOW] = 0
    first = model(tokens[:, :12], attention_mask=mask[:, :12])
    padded = model(tokens[:, 12:], attention_mask=mask, mems=first.mems).logits
    alone = in_segments(model, tokens[:1, 10:], [2, 12])[:, 2:]
    assert float((padded[:1] - alone).abs().max()) <= 1e-5
    # A mask of the segment alone takes the memory for real.
    seen = model(tokens[:, 12:], attention_mask=mask[:, 12:], mems=first.mems).logits
    assert float((seen[:1] - alone).abs().max()) > 1e-3
    behind = torch.ones_like(tokens)
    behind[0, 8:] = 0
    found = model(tokens, attention_mask=behind).logits[:1, :8]
    assert float((found - model(tokens[:1, :8]).logits).abs().max()) <= 1e-5


GENERATE = {"max_new_tokens": 11, "min_new_tokens": 11, "do_sample": False, "return_dict_in_generate": True}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("rsa", RSA, ids=RSA_IDS)
@torch.no_grad()
def test_generate_with_and_without_memory(rsa, beams):
    model, tokens = build(rsa=rsa), text(length=9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens * mask, "attention_mask": mask, "num_beams": beams, "output_scores": True}
    with_memory = model.generate(**inputs, **GENERATE)
    without = model.generate(**inputs, **GENERATE, use_cache=False)
    assert torch.equal(with_memory.sequences, without.sequences)
    for a, b in zip(with_memory.scores, without.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_one_token_is_computed_a_step(monkeypatch):
    lengths = []
    forward = BlockRecurrentForCausalLM.forward

    def counting(self, input_ids=None, **keywords):
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **keywords)

    monkeypatch.setattr(BlockRecurrentForCausalLM, "forward", counting)
    build().generate(text(length=9), **GENERATE)
    assert lengths == [9] + [1] * 10


@pytest.mark.parametrize("options", [{}, {"num_beams": 4, "num_return_sequences": 2}], ids=["greedy", "beams"])
@torch.no_grad()
def test_generate_goes_on_from_a_memory(options):
    model, tokens = build(rsa={}), text()
    whole = model.generate(tokens, **GENERATE, **options).sequences[:, 24:]
    mems = model(tokens[:, :16]).mems
    assert torch.equal(model.generate(tokens[:, 16:], mems=mems, **GENERATE, **options).sequences[:, 8:], whole)
    assert not torch.equal(model.generate(tokens[:, 16:], **GENERATE, **options).sequences[:, 8:], whole)


def test_memory_that_does_not_fit():
    model, tokens = build(), text(length=4)
    cache, state = torch.zeros(2, 2, 8, 7, 4), torch.zeros(2, 3, 32)
    wrong = {
        "3 entries; one for each of the 3 layers is needed, then one for each of the 1 recurrent": (cache,) * 3,
        r"mems\[0\] has shape \(3, 2, 8, 7, 4\)": (cache.new_zeros(3, 2, 8, 7, 4), cache, cache, state),
        r"mems\[2\] has shape \(2, 2, 8, 6, 4\).*as many positions": (cache, cache, cache[:, :, :, 1:], state),
        r"mems\[0\] has shape \(2, 7, 32\)": (torch.zeros(2, 7, 32), cache, cache, state),
        r"mems\[3\] has shape \(2, 4, 32\).*\[2, 3, 32\]": (cache, cache, cache, torch.zeros(2, 4, 32)),
        r"mems\[1\] is torch.float64.*torch.float32": (cache, cache.double(), cache, state),
        r"hold 10 positions; with window_size=5.*at most 9": (*[torch.zeros(2, 2, 8, 10, 4)] * 3, state),
    }
    for message, mems in wrong.items():
        with pytest.raises(ValueError, match=message):
            model(tokens, mems=mems)
    model(tokens, mems=(cache, cache, cache, state))


def test_input_that_does_not_fit():
    model = build()
    for inputs in ({}, {"input_ids": text(), "inputs_embeds": torch.zeros(2, 24, 32)}):
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model(**inputs)
    for token in (VOCAB, -1):
        with pytest.raises(IndexError):
            model(torch.tensor([[token]]))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("window_size=0", {"window_size": 0}),
        ("window_size=-5", {"window_size": -5}),
        ("num_state_vectors=0", {"num_state_vectors": 0}),
        ("n_head=0", {"n_head": 0}),
        ("cell='triple': one of 'skip', 'single', 'dual'", {"cell": "triple"}),
        ("gate='gru': one of 'fixed', 'lstm'", {"gate": "gru"}),
        (r"recurrent_layers=\[3\].*of the 3.*from -3 to 2", {"recurrent_layers": [3]}),
        (r"recurrent_layers=\[1, -2\].*different", {"recurrent_layers": [1, -2]}),
        ("num_buckets=1", {"relative_attention_num_buckets": 1}),
        ("max_distance=2", {"relative_attention_max_distance": 2}),
    ],
)
def test_configs_that_do_not_fit(message, changes):
    with pytest.raises(ValueError, match=message):
        config(**changes)
