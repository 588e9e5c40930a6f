"""Counts of bytes as a language model: what a byte-level model should beat.

The probability of a byte b after the last n bytes h is mixed with that after the last n − 1, h′ (Witten and Bell,
1991): p(b | h) = (count(hb) + kinds(h) p(b | h′)) / (count(h) + kinds(h)), where kinds(h) is the number of different
bytes after h. Without counts, p(b) = 1/256.
"""

from typing import Any

import numpy as np
from torch import Tensor

MOST_BYTES = 6  # n


def bits_of_bytes(train: Tensor, text: Tensor) -> Any:
    """Bits of each byte of a text but the first, with n = 0 … 6 in turn, [7, N − 1]."""
    p, found = np.full(len(text), 1 / 256), []
    for n in range(MOST_BYTES + 1):
        grams, counts = np.unique(_grams(train, n + 1), return_counts=True)
        contexts, first, kinds = np.unique(grams >> 8, return_index=True, return_counts=True)
        asked = _grams(text, n + 1)
        seen, of_context = _look_up(grams, counts, asked), _look_up(contexts, kinds, asked >> 8)
        total = _look_up(contexts, np.add.reduceat(counts, first), asked >> 8)
        p[n:] = np.where(total > 0, (seen + of_context * p[n:]) / np.maximum(total + of_context, 1), p[n:])
        found.append(-np.log2(p[1:]))
    return np.stack(found)


def score_counts(train: Tensor, validation: Tensor, test: Tensor, parts: int) -> tuple[float, list[float]]:
    """Bits per byte of a validation text, and of the parts of a test text, with the n that is best on the former."""
    by_order, size = bits_of_bytes(train, validation).mean(1), len(test) // parts
    bits = np.pad(bits_of_bytes(train, test)[by_order.argmin()], (1, 0))[: parts * size].reshape(parts, size)
    return float(by_order.min()), bits[:, 1:].mean(1).tolist()


def _grams(text: Tensor, n: int) -> Any:
    """The n bytes that end at each position from n − 1 on, as one number."""
    codes = text.numpy().astype(np.uint64)
    return sum(codes[i : len(codes) - n + 1 + i] << np.uint64(8 * (n - 1 - i)) for i in range(n))


def _look_up(known: Any, values: Any, asked: Any) -> Any:
    """The values of what is asked, 0 where it is not known."""
    places = np.searchsorted(known, asked).clip(max=len(known) - 1)
    return np.where(known[places] == asked, values[places], 0)
