"""Downstream scores of byte-level models, held to models whose answers are known."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.byte_models import SHAPES
from experiments.downstream import (
    LETTERS,
    key_value_rows,
    made_up_word_rows,
    recalled_pairs,
    saved_on_made_up_words,
)


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


def test_a_model_that_copies_saves_the_bits_of_a_made_up_word():
    rows = torch.randint(128, 256, (5, 64), generator=generator())
    found, letters = made_up_word_rows(rows, generator())
    for row in found:
        _, first, _, second = bytes(row.tolist()).split(b" ")
        assert first == second and len(first) == LETTERS and first.isalpha()
    # Two letters say which word it is; then half of the probability is on the right letter.
    assert saved_on_made_up_words(Copier(3), found, letters) == pytest.approx(math.log2(256 * (0.5 + 0.5 / 256)))
    assert saved_on_made_up_words(Copier(3, sure=0.0), found, letters) == pytest.approx(0, abs=1e-6)
    # The places are those of the letters, from the third on.
    assert saved_on_made_up_words(Copier(3), found, letters - 1) < 7


def test_every_asked_key_has_the_value_of_its_pair():
    tokens, labels = key_value_rows(20, 48, generator())
    for row, asked in zip(tokens.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[:24:2], row[1:24:2], strict=True))
        assert len(pairs) == 12 and pairs == dict(zip(row[24::2], row[25::2], strict=True))
        assert asked[:24] == [-100] * 24 and asked[24::2] == [-100] * 12 and asked[25::2] == row[25::2]


@pytest.mark.parametrize(("model", "expected"), [(Copier(1), 1.0), (Copier(1, sure=0.0), 0.0)])
def test_recalled_pairs_are_those_that_the_model_names(model, expected):
    # A model without an answer names byte 0, which is no value.
    found = recalled_pairs(model, SHAPES["0.03M"], learning_rate=0.0, steps=1, seed=0)
    assert found == pytest.approx(expected, abs=0.05)
