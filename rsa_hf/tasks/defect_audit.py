"""Statistics of a defect-detection data set that can make its scores misleading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rsa_hf.tasks.defect_data import Example, conflicting, identity
from rsa_hf.utils.table import format_table

__all__ = ["audit", "format_audit"]

_BATCH = 1000  # functions per call of the tokenizer: enough for its threads, bounded in memory
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def audit(
    splits: Mapping[str, Sequence[Example]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Any]:
    """Count imbalance, duplicates, contradictory labels, copies across splits, and truncation.

    Functions are the same if their texts agree up to whitespace.

    Args:
        splits: The functions of each split, none empty.
        tokenizer: Measures the lengths, with special tokens.
        max_length: Number of tokens that the model sees.

    Returns:
        Numbers for `json.dump`. "splits" holds for each split `examples`, `positives`, `majority_share`, `duplicates`
        (repetitions of an earlier example), `conflicting_labels` (distinct functions with both labels),
        `longer_than_max_length` (share of examples) and `token_quantiles`. Beside it stand `max_length`,
        `conflicting_labels` over all splits, and `cross_split_copies`: the distinct functions that two splits share.
    """
    functions = {split: {identity(example) for example in examples} for split, examples in splits.items()}
    statistics = {}
    for split, examples in splits.items():
        size, positives = len(examples), sum(example.target for example in examples)
        lengths = _token_counts(examples, tokenizer)
        quantiles = np.quantile(lengths, _QUANTILES, method="inverted_cdf")
        statistics[split] = {
            "examples": size,
            "positives": positives,
            "majority_share": max(positives, size - positives) / size,
            "duplicates": size - len(functions[split]),
            "conflicting_labels": len(conflicting(examples)),
            "longer_than_max_length": float(np.mean(lengths > max_length)),
            "token_quantiles": {f"{q:.0%}": int(n) for q, n in zip(_QUANTILES, quantiles, strict=True)},
        }
    return {
        "max_length": max_length,
        "splits": statistics,
        "conflicting_labels": len(conflicting([e for examples in splits.values() for e in examples])),
        "cross_split_copies": {f"{a}/{b}": len(functions[a] & functions[b]) for a, b in combinations(splits, 2)},
    }


def _token_counts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Any:
    counts: list[int] = []
    for start in range(0, len(examples), _BATCH):
        texts = [example.func for example in examples[start : start + _BATCH]]
        encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        counts += map(len, encoded["input_ids"])
    return np.array(counts)


def format_audit(report: Mapping[str, Any]) -> str:
    """Format the result of `audit` as a table for the terminal.

    Args:
        report: The result of `audit`.

    Returns:
        The text, with one row for each split.
    """
    header = ["split", "examples", "defective", "majority", "duplicates", "both labels"]
    rows = [[*header, f"> {report['max_length']} tokens", *(f"{q:.0%}" for q in _QUANTILES)]]
    for split, numbers in report["splits"].items():
        counts = (numbers["examples"], numbers["positives"], f"{numbers['majority_share']:.2%}")
        problems = (numbers["duplicates"], numbers["conflicting_labels"], f"{numbers['longer_than_max_length']:.2%}")
        rows.append([str(cell) for cell in (split, *counts, *problems, *numbers["token_quantiles"].values())])
    copies = ", ".join(f"{pair} {count}" for pair, count in report["cross_split_copies"].items())
    return (
        f"{format_table(rows)}\n"
        "(the percentages at the right are quantiles of the length in tokens)\n"
        f"functions in two splits: {copies or 'only one split'}\n"
        f"functions with both labels, over all splits: {report['conflicting_labels']}"
    )
