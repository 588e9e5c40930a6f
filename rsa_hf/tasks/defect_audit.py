"""What can make the scores of a data set misleading: imbalance, duplicates, contradictions, leaks, truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rsa_hf.tasks.defect_data import Example, conflicting, identity

__all__ = ["audit", "format_audit"]

_BATCH = 1000  # functions handed to the tokenizer at a time: enough for its threads, little for the memory
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def audit(
    splits: Mapping[str, Sequence[Example]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Any]:
    """Count what can make scores misleading: imbalance, duplicates, contradictions, leaks, truncation.

    Functions count as the same where their texts agree up to whitespace.

    Args:
        splits: The functions of each split.
        tokenizer: Measures the lengths, special tokens included.
        max_length: Tokens the model gets to see.

    Returns:
        Numbers ready for `json.dump`: under "splits" for each split `examples`, `positives`, `majority_share`,
        `duplicates` (examples that repeat an earlier one), `conflicting_labels` (distinct functions that carry
        both labels), `longer_than_max_length` (share of examples) and `token_quantiles`; beside it
        `max_length`, `conflicting_labels` over all splits together, and under `cross_split_copies` for each
        two splits the distinct functions that stand in both.

    Raises:
        ValueError: If a split is empty.
    """
    report: dict[str, Any] = {"max_length": max_length, "splits": {}}
    functions = {split: {identity(example) for example in examples} for split, examples in splits.items()}
    for split, examples in splits.items():
        if not examples:
            raise ValueError(f"the {split} split is empty; leave it out or give it functions")
        size, positives = len(examples), sum(example.target for example in examples)
        lengths = _token_counts(examples, tokenizer)
        quantiles = np.quantile(lengths, _QUANTILES, method="inverted_cdf")
        report["splits"][split] = {
            "examples": size,
            "positives": positives,
            "majority_share": max(positives, size - positives) / size,
            "duplicates": size - len(functions[split]),
            "conflicting_labels": len(conflicting(examples)),
            "longer_than_max_length": float(np.mean(lengths > max_length)),
            "token_quantiles": {f"{q:.0%}": int(n) for q, n in zip(_QUANTILES, quantiles, strict=True)},
        }
    report["conflicting_labels"] = len(conflicting([e for examples in splits.values() for e in examples]))
    report["cross_split_copies"] = {
        f"{first}/{second}": len(functions[first] & functions[second]) for first, second in combinations(splits, 2)
    }
    return report


def _token_counts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Any:
    counts: list[int] = []
    for start in range(0, len(examples), _BATCH):
        texts = [example.func for example in examples[start : start + _BATCH]]
        encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        counts += map(len, encoded["input_ids"])
    return np.array(counts)


def format_audit(report: Mapping[str, Any]) -> str:
    """Lay out the result of `audit` as a table to read.

    Args:
        report: What `audit` returned.

    Returns:
        Lines of text, one row for each split.
    """
    header = ["split", "examples", "defective", "majority", "duplicates", "both labels"]
    header += [f"> {report['max_length']} tokens", *(f"{q:.0%}" for q in _QUANTILES)]
    rows = [header]
    for split, numbers in report["splits"].items():
        counts = [numbers[key] for key in ("examples", "positives")]
        shares = [f"{numbers[key]:.2%}" for key in ("majority_share", "longer_than_max_length")]
        problems = [numbers[key] for key in ("duplicates", "conflicting_labels")]
        row = [split, *counts, shares[0], *problems, shares[1], *numbers["token_quantiles"].values()]
        rows.append([str(cell) for cell in row])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    copies = ", ".join(f"{pair} {count}" for pair, count in report["cross_split_copies"].items())
    lines += ["(the percentages at the right are quantiles of the length in tokens)"]
    lines += [f"functions in two splits: {copies or 'only one split'}"]
    lines += [f"functions with both labels, over all splits: {report['conflicting_labels']}"]
    return "\n".join(lines)
