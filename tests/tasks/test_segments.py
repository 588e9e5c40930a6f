"""Scores of models that carry memory over the segments of a text, against one pass over the whole text."""

from functools import partial

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GPT2Config, GPT2LMHeadModel

from models import tiny
from models.tiny import VOCAB
from rsa_hf.tasks.text_blocks import EvaluationSegments
from rsa_hf.tasks.text_scores import evaluate_language_model

transformer_xl = partial(tiny.build, "transfo-xl", mem_len=64)
MODELS = {
    "transformer_xl": transformer_xl,
    "rsa_xl": partial(transformer_xl, rsa={}),
    "adaptive": partial(transformer_xl, cutoffs=[9, 20], div_val=2),
    "lstm": partial(tiny.build, "recurrent", dilations=[1, 1]),
    "gru": partial(tiny.build, "recurrent", cell="gru", dilations=[1, 1]),
    "dilated_rnn": partial(tiny.build, "recurrent", cell="rnn", dilations=[2, 5]),
}


def draw(length, seed=0):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def loss_in_one_pass(model, tokens):
    """The mean loss of all tokens except the first in one forward, in nats."""
    log_probabilities = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    return -float(log_probabilities.gather(1, tokens[1:, None]).mean())


def score(model, tokens, block_size, **memory):
    segments = EvaluationSegments(tokens, block_size, num_bytes=len(tokens) - 1, num_words=1)
    return evaluate_language_model(model, segments, batch_size=4, memory=memory)


@pytest.mark.parametrize("name", MODELS)
def test_segments_score_like_one_pass(name):
    model, tokens = MODELS[name]().double(), draw(61)
    expected = loss_in_one_pass(model, tokens)
    for block_size in (5, 16, 100):
        result = score(model, tokens, block_size)
        assert result["num_tokens"] == 60
        assert result["loss_nats_per_token"] == pytest.approx(expected, abs=1e-9)
    # Without the memory, the score is another one.
    argument, forward = model.segment_state, model.forward
    model.forward = lambda **inputs: forward(**{**inputs, argument: None})
    assert abs(score(model, tokens, 5)["loss_nats_per_token"] - expected) > 1e-3


def test_eval_memory_sets_the_memory_during_evaluation_alone():
    model, tokens = MODELS["rsa_xl"]().double(), draw(61)
    expected = loss_in_one_pass(model, tokens)
    model.config.mem_len = 4
    short = score(model, tokens, 6)["loss_nats_per_token"]
    assert abs(short - expected) > 1e-3
    assert score(model, tokens, 6, mem_len=64)["loss_nats_per_token"] == pytest.approx(expected, abs=1e-9)
    assert model.config.mem_len == 4
    assert score(model, tokens, 6)["loss_nats_per_token"] == short
    other = score(model, tokens, 6, mem_len=20, same_length=True)["loss_nats_per_token"]
    assert min(abs(other - short), abs(other - expected)) > 1e-4
    assert (model.config.mem_len, model.config.same_length) == (4, False)


def test_wrong_settings_of_the_memory_are_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=VOCAB))
    model, tokens = transformer_xl(), draw(20)
    for each, memory, message in (
        (gpt2, {}, "GPT2LMHeadModel carries nothing .*carry_memory"),
        (gpt2, {"mem_len": 3}, "eval_memory=.*'mem_len'.* a GPT2LMHeadModel allows none"),
        (model, {"d_model": 64}, "'d_model'.* allows .*'mem_len'"),
        (model, {"mem_len": -1}, "mem_len=-1 must be"),
        (model, {"mem_len": "long"}, "(?s)mem_len.*expected int"),
        (model, {"mem_len": 0, "same_length": True}, "mem_len=0 must be"),
        (model, {"mem_len": 0}, "no mems to carry"),
    ):
        with pytest.raises((ValueError, StrictDataclassError), match=message):
            score(each, tokens, 5, **memory)
    assert model.config.mem_len == 64
