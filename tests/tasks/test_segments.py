"""Scores of models that carry memory over the segments of a text, against one pass over the whole text."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rsa_hf import RSAConfig, patch_model
from rsa_hf.models.recurrent import RecurrentConfig
from rsa_hf.models.transformer_xl import TransformerXLConfig
from rsa_hf.tasks.language_modeling import evaluate_language_model
from rsa_hf.tasks.text_data import EvaluationSegments

VOCAB = 29
XL = {
    "vocab_size": VOCAB, "cutoffs": [], "div_val": 1, "d_model": 32, "n_head": 8, "d_head": 4, "d_inner": 48,
    "n_layer": 2, "mem_len": 64, "clamp_len": -1, "same_length": False, "dropout": 0.0, "eos_token_id": None,
    "init_std": 0.3, "proj_init_std": 0.3,
}  # fmt: skip
PLAN = RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_init=0.5)


def transformer_xl(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(TransformerXLConfig(**{**XL, **changes})).double().eval()


def recurrent(cell, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "dropout": 0.0, "initializer_range": 2.0, **changes}
    return AutoModelForCausalLM.from_config(RecurrentConfig(vocab_size=VOCAB, cell=cell, **sizes)).double().eval()


MODELS = {
    "transformer_xl": transformer_xl,
    "rsa_xl": lambda: patch_model(transformer_xl(), PLAN),
    "adaptive": lambda: transformer_xl(cutoffs=[9, 20], div_val=2),
    "lstm": lambda: recurrent("lstm"),
    "gru": lambda: recurrent("gru"),
    "dilated_rnn": lambda: recurrent("rnn", dilations=[2, 5]),
}


def draw(length, seed=0):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def loss_in_one_pass(model, tokens):
    """Mean over all tokens but the first, in nats, of a single forward."""
    log_probabilities = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    return -float(log_probabilities.gather(1, tokens[1:, None]).mean())


def score(model, tokens, block_size, **memory):
    segments = EvaluationSegments(tokens, block_size, num_bytes=len(tokens) - 1, num_words=1)
    return evaluate_language_model(model, segments, batch_size=4, memory=memory)


@pytest.mark.parametrize("block_size", [5, 16, 100])
@pytest.mark.parametrize("name", MODELS)
def test_segments_score_as_one_pass_does(name, block_size):
    model, tokens = MODELS[name](), draw(61)
    expected = loss_in_one_pass(model, tokens)
    result = score(model, tokens, block_size)
    assert result["num_tokens"] == 60
    assert result["loss_nats_per_token"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_memory_that_is_dropped_is_caught(name):
    """The control: without what the segments before left, the score is another one, and by much."""
    model, tokens = MODELS[name](), draw(61)
    expected = loss_in_one_pass(model, tokens)
    argument, forward = model.segment_state, model.forward
    model.forward = lambda **inputs: forward(**{**inputs, argument: None})
    assert abs(score(model, tokens, 5)["loss_nats_per_token"] - expected) > 1e-3


def test_a_longer_memory_in_evaluation():
    """Enough of it is one pass over the text, less is not; the model remembers what it did, afterwards."""
    model, tokens = MODELS["rsa_xl"](), draw(61)
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


def test_mistakes_in_an_evaluation():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=VOCAB))
    tokens = draw(20)
    with pytest.raises(ValueError, match=r"a GPT2LMHeadModel carries nothing .* Set data.carry_memory to false"):
        score(gpt2, tokens, 5)
    with pytest.raises(ValueError, match=r"eval_memory=\['mem_len'\]: a GPT2LMHeadModel allows none"):
        score(gpt2, tokens, 5, mem_len=3)
    model = transformer_xl()
    with pytest.raises(
        ValueError, match=r"=\['d_model'\]: a TransformerXLForCausalLM allows \['mem_len', 'same_length'"
    ):
        score(model, tokens, 5, d_model=64)
    for wrong in ({"mem_len": -1}, {"mem_len": "long"}, {"mem_len": 0, "same_length": True}):
        with pytest.raises(ValueError, match=r"eval_memory=\{.*does not fit the model"):
            score(model, tokens, 5, **wrong)
    assert model.config.mem_len == 64
    with pytest.raises(ValueError, match=r"returned no mems to carry .* use_cache=True and a memory of more than 0"):
        score(model, tokens, 5, mem_len=0)
