"""The data of defect detection: read from the embedded set, the Hub or files, de-duplicated, subsampled, and audited.

Functions are the same if their texts agree up to whitespace.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from rsa_hf.tasks.compressed import open_compressed
from rsa_hf.tasks.python_defects import Example, load_python_defects
from rsa_hf.utils.text import brief, format_table

__all__ = [
    "SPLITS",
    "DefectDataConfig",
    "Example",
    "audit",
    "format_audit",
    "in_batches",
    "load_defect_data",
    "read_json_lines",
]

SPLITS = ("train", "validation", "test")
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

Source = Literal["embedded", "hub", "files"]
LongFunctions = Literal["truncate", "chunk"]


@dataclass
class DefectDataConfig:
    """The data of defect detection, and how functions are cut to the model's length.

    Args:
        source: "embedded" (functions of Python's standard library with injected defects, no download), "hub" or
            "files".
        train_file: for "files": training functions as JSON lines with the fields `func` and `target` (.jsonl,
            .jsonl.gz or .jsonl.xz).
        validation_file: for "files": validation functions (optional).
        test_file: for "files": test functions (optional).
        hub_dataset: for "hub": the data set, with the columns `func` and `target`.
        max_train_examples: keep at most this many training functions, drawn at random with the classes in proportion;
            None: all.
        max_eval_examples: the same for validation and test, each.
        deduplicate: drop training functions that repeat another one (up to whitespace), carry both labels, or also
            occur in validation or test. Validation and test stay as they are, so that scores are comparable.
        max_length: maximum length of an input in tokens, with special tokens.
        long_functions: "truncate" keeps the beginning of a longer function, "chunk" cuts it into overlapping windows.
        chunk_overlap: for "chunk": number of tokens shared by neighbouring windows.
        min_characters: for "embedded": length of the shortest function.
        max_characters: for "embedded": length of the longest function.
        defect_kinds: for "embedded": the kinds of defect to inject, of `python_defects.DEFECT_KINDS`; None: all.
        seed: seed of the embedded defects and of the subsampling. Use the same one for runs that are compared.

    Raises:
        ValueError: a value is not allowed.
    """

    source: Source = "embedded"
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = None
    hub_dataset: str = "google/code_x_glue_cc_defect_detection"
    max_train_examples: int | None = None
    max_eval_examples: int | None = None
    deduplicate: bool = True
    max_length: int = 256
    long_functions: LongFunctions = "truncate"
    chunk_overlap: int = 64
    min_characters: int = 60
    max_characters: int = 400
    defect_kinds: list[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("source", get_args(Source)), ("long_functions", get_args(LongFunctions))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}.")
        files = {f"{split}_file": getattr(self, f"{split}_file") for split in SPLITS}
        if self.source == "files" and self.train_file is None:
            raise ValueError("train_file=None: source 'files' needs the path of the training functions.")
        if self.source != "files" and any(files.values()):
            raise ValueError(f"source={self.source!r}: reads none of {files}. Choose 'files', or remove them.")
        for name in ("max_train_examples", "max_eval_examples"):
            if getattr(self, name) is not None and getattr(self, name) < 2:
                raise ValueError(
                    f"{name}={getattr(self, name)}: choose 2 or more, one of each class, or null for all."
                )


def load_defect_data(config: DefectDataConfig) -> dict[str, list[Example]]:
    """Read, check, de-duplicate and subsample the data.

    Args:
        config: selects the data.

    Returns:
        The functions of each split: "train" always, "validation" and "test" if the source has them.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged, a row is no function with a label 0 or 1, a split is empty, or all training
            functions have one class.
    """
    if config.source == "embedded":
        splits = load_python_defects(
            seed=config.seed,
            min_characters=config.min_characters,
            max_characters=config.max_characters,
            kinds=config.defect_kinds,
        )
    elif config.source == "hub":
        loaded = datasets.load_dataset(config.hub_dataset)
        if "train" not in loaded:
            raise ValueError(f"hub_dataset={config.hub_dataset!r}: has the splits {list(loaded)}; 'train' is needed.")
        splits = {
            split: [_example(row, f"{config.hub_dataset}, {split} row {i}") for i, row in enumerate(loaded[split], 1)]
            for split in SPLITS
            if split in loaded
        }
    else:
        files = {split: getattr(config, f"{split}_file") for split in SPLITS}
        splits = {split: read_json_lines(file) for split, file in files.items() if file is not None}
    if config.deduplicate:
        splits["train"] = _deduplicated(splits)
    for split, examples in splits.items():
        if not examples:
            raise ValueError(f"the {split} split is empty, or nothing of it is left. Give it more functions.")
    if len({example.target for example in splits["train"]}) == 1:
        raise ValueError(
            f"all {len(splits['train'])} training functions have target {splits['train'][0].target}. Give functions "
            "of both classes, clean (0) and defective (1)."
        )
    limits = {"train": config.max_train_examples}
    return {
        split: _subsample(examples, limits.get(split, config.max_eval_examples), config.seed)
        for split, examples in splits.items()
    }


def read_json_lines(path: str | Path) -> list[Example]:
    """Read functions from JSON lines. Blank lines are skipped.

    Args:
        path: a `.jsonl`, `.jsonl.gz` or `.jsonl.xz` file. Each line is an object with the fields `func`, the source
            text, and `target`, the label 0 or 1 (or false or true). A whole number `idx` is kept, other fields are
            ignored.

    Returns:
        The functions, in the order of the file.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file has another ending or is corrupt, or a line is no such object; the message names the line.
    """
    with open_compressed(path, ".jsonl") as lines:
        return [_example(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def _example(row: Any, where: str) -> Example:
    """Check a row of `func` and `target`, given as a dict or as a line of JSON."""
    try:
        row = json.loads(row) if isinstance(row, bytes) else row
        func, target = (row.get("func"), row.get("target")) if isinstance(row, dict) else (None, None)
        if not isinstance(func, str) or not func.strip() or target not in (0, 1):  # false and true are 0 and 1, too
            raise ValueError(
                f"{brief(row)} is no labelled function; needed are `func`, the text of a function, and `target`, "
                "0 (clean) or 1 (defective)"
            )
        func.encode()  # JSON can spell half a surrogate pair, which tokenizers refuse
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error
    idx = row.get("idx")
    return Example(func, int(target), idx=idx if isinstance(idx, int) else None)


def _identity(example: Example) -> str:
    return " ".join(example.func.split())


def _conflicting(examples: Sequence[Example]) -> set[str]:
    """The functions that carry both labels."""
    labels = defaultdict(set)
    for example in examples:
        labels[_identity(example)].add(example.target)
    return {function for function, targets in labels.items() if len(targets) == 2}


def _deduplicated(splits: Mapping[str, Sequence[Example]]) -> list[Example]:
    dropped = _conflicting(splits["train"])
    dropped |= {_identity(example) for split in SPLITS[1:] for example in splits.get(split, [])}
    kept: dict[str, Example] = {}
    for example in splits["train"]:
        if _identity(example) not in dropped:
            kept.setdefault(_identity(example), example)
    return list(kept.values())


def _subsample(examples: list[Example], limit: int | None, seed: int) -> list[Example]:
    """Keep `limit` examples, in order and with the classes in proportion, at least one of each."""
    if limit is None or len(examples) <= limit:
        return examples
    indices = [[i for i, example in enumerate(examples) if example.target == target] for target in (0, 1)]
    num_positive = round(limit * len(indices[1]) / len(examples))
    if all(indices):
        num_positive = min(max(num_positive, 1), limit - 1)
    kept = []
    for of_class, count in zip(indices, (limit - num_positive, num_positive), strict=True):
        # The same seed for both classes keeps pairs together: in the embedded data, the n-th clean and the n-th
        # defective function are a pair.
        Random(seed).shuffle(of_class)
        kept += of_class[:count]
    return [examples[index] for index in sorted(kept)]


# --- audit ----------------------------------------------------------------------------------------------------------


def audit(
    splits: Mapping[str, Sequence[Example]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Any]:
    """Count what can make scores misleading: imbalance, copies, contradictory labels, truncation.

    Args:
        splits: the functions of each split, none empty.
        tokenizer: measures the lengths, with special tokens.
        max_length: number of tokens that the model sees.

    Returns:
        Numbers for `json.dump`. "splits" holds for each split `examples`, `positives`, `majority_share`, `duplicates`
        (repetitions of an earlier example), `conflicting_labels` (distinct functions with both labels),
        `longer_than_max_length` (share of examples) and `token_quantiles`. Next to it are `max_length`,
        `conflicting_labels` over all splits, and `cross_split_copies`: the numbers of distinct functions that two
        splits share.
    """
    functions = {split: {_identity(example) for example in examples} for split, examples in splits.items()}
    statistics = {}
    for split, examples in splits.items():
        size, positives = len(examples), sum(example.target for example in examples)
        lengths = np.array(
            [len(ids) for texts in in_batches(examples) for ids in tokenizer(texts, verbose=False)["input_ids"]]
        )
        quantiles = np.quantile(lengths, QUANTILES, method="inverted_cdf")
        statistics[split] = {
            "examples": size,
            "positives": positives,
            "majority_share": max(positives, size - positives) / size,
            "duplicates": size - len(functions[split]),
            "conflicting_labels": len(_conflicting(examples)),
            "longer_than_max_length": float(np.mean(lengths > max_length)),
            "token_quantiles": {f"{q:.0%}": int(n) for q, n in zip(QUANTILES, quantiles, strict=True)},
        }
    return {
        "max_length": max_length,
        "splits": statistics,
        "conflicting_labels": len(_conflicting([e for examples in splits.values() for e in examples])),
        "cross_split_copies": {f"{a}/{b}": len(functions[a] & functions[b]) for a, b in combinations(splits, 2)},
    }


def in_batches(examples: Sequence[Example]) -> Iterator[list[str]]:
    """Texts for calls of the tokenizer: enough of them for its threads, bounded in memory."""
    for start in range(0, len(examples), 1000):
        yield [example.func for example in examples[start : start + 1000]]


def format_audit(report: Mapping[str, Any]) -> str:
    """Format the result of `audit` as a table for the terminal, with one row for each split."""
    header = ["split", "examples", "defective", "majority", "duplicates", "both labels"]
    rows = [[*header, f"> {report['max_length']} tokens", *(f"{q:.0%}" for q in QUANTILES)]]
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
