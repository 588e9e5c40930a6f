"""Recall of key-value pairs, held to models whose answers are known."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.byte_models import SHAPES
from experiments.byte_recall import key_value_rows, recalled_pairs


class Copier(nn.Module):
    """Predicts, with probability `sure`, what followed the last occurrence of the last token."""

    def __init__(self, sure):
        super().__init__()
        self.sure = sure
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, labels=None):
        probabilities = torch.full((*input_ids.shape, 256), 1 / 256)
        for row, tokens in enumerate(input_ids.tolist()):
            followers = {}
            for t, token in enumerate(tokens):
                if token in followers:
                    found = F.one_hot(torch.tensor(followers[token]), 256)
                    probabilities[row, t] = self.sure * found + (1 - self.sure) / 256
                if t + 1 < len(tokens):
                    followers[token] = tokens[t + 1]
        return SimpleNamespace(logits=probabilities.log() + self.weight, loss=self.weight)


def test_every_asked_key_has_the_value_of_its_pair():
    tokens, labels = key_value_rows(20, 48, torch.Generator().manual_seed(0))
    for row, asked in zip(tokens.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[:24:2], row[1:24:2], strict=True))
        assert len(pairs) == 12 and pairs == dict(zip(row[24::2], row[25::2], strict=True))
        assert asked[:24] == [-100] * 24 and asked[24::2] == [-100] * 12 and asked[25::2] == row[25::2]


@pytest.mark.parametrize(("model", "expected"), [(Copier(0.5), 1.0), (Copier(0.0), 0.0)])
def test_recalled_pairs_are_those_that_the_model_names(model, expected):
    # A model without an answer names byte 0, which is no value.
    found = recalled_pairs(model, SHAPES["0.03M"], learning_rate=0.0, steps=1, seed=0)
    assert found == pytest.approx(expected, abs=0.05)
