"""The counts of bytes that the models of `confirmation` and `rivals` are compared with, against a double loop."""

import math
from collections import Counter

import torch

from experiments.byte_counts import bits_of_bytes, score_counts


def test_counts_agree_with_the_recursion_written_out():
    text = torch.randint(97, 100, (60,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    asked = torch.tensor([97, 98, 99, 97, 97, 200, 98, 98, 97, 99], dtype=torch.uint8)
    train, found = bytes(text.tolist()), bits_of_bytes(text, asked)

    def p(byte, before):
        lower = 1 / 256 if not before else p(byte, before[1:])
        after = Counter(
            train[i + len(before)] for i in range(len(train) - len(before)) if train[i:].startswith(before)
        )
        return (after[byte] + len(after) * lower) / (after.total() + len(after)) if after else lower

    whole = bytes(asked.tolist())
    for n, of_order in enumerate(found):
        expected = [-math.log2(p(byte, whole[max(0, i - n) : i])) for i, byte in enumerate(whole)][1:]
        torch.testing.assert_close(torch.tensor(of_order), torch.tensor(expected, dtype=torch.float64))
    best = found.mean(1).argmin()
    score, parts = score_counts(text, asked, asked, 2)
    assert score == found.mean(1)[best] and parts == [found[best][:4].mean(), found[best][5:].mean()]
