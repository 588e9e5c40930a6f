"""The data of defect detection: read from the embedded set, the Hub or files, de-duplicated and subsampled.

Functions are the same if their texts agree up to whitespace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any, Literal

from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from rsa_hf.tasks.data_files import SPLITS, DataSource, checked, json_lines, kind_of_file, load_splits
from rsa_hf.tasks.python_defects import Example, load_python_defects
from rsa_hf.utils.text import brief, format_table


@dataclass
class DefectDataConfig(DataSource):
    """The data of defect detection, and how functions are cut to the model's length.

    Without files and `dataset_name`, the data is embedded: functions of Python's standard library with injected
    defects, which needs no download.

    Raises:
        ValueError: a value is not allowed.
    """

    text_column_name: str = HfArg(default="func", help="Column or field with the text of a function.")
    label_column_name: str = HfArg(default="target", help="Column or field with its label, 1 for a defective one.")
    max_train_samples: int | None = HfArg(
        default=None,
        help="At most so many training functions, at random with the classes in proportion; default all.",
    )
    max_eval_samples: int | None = HfArg(default=None, help="The same for validation and test, each.")
    deduplicate: bool = HfArg(
        default=True,
        help="Drop training functions that repeat another one (up to whitespace), carry both labels, or also occur in "
        "validation or test, which stay as they are.",
    )
    max_seq_length: int = HfArg(default=256, help="Tokens of an input, with special tokens.")
    long_functions: Literal["truncate", "chunk"] = HfArg(
        default="truncate",
        help="truncate keeps the beginning of a longer function, chunk cuts it into overlapping windows.",
    )
    chunk_overlap: int = HfArg(default=64, help="For chunk: tokens that neighbouring windows share.")
    class_weights: bool = HfArg(default=False, help="Weight the loss so that each class has the same total weight.")
    min_characters: int = HfArg(default=60, help="Embedded data: length of the shortest function.")
    max_characters: int = HfArg(default=400, help="Embedded data: length of the longest function.")
    defect_kinds: list[str] | None = HfArg(default=None, help="Embedded data: kinds of defect; default all.")
    sample_seed: int = HfArg(default=0, help="Seed of the embedded defects and of max_*_samples.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in self.files.values():
            if kind_of_file(path) not in (".jsonl", ".json"):
                raise ValueError(f"{path}: JSON lines are needed, in .jsonl, .jsonl.gz or .jsonl.xz.")
        for name in ("max_train_samples", "max_eval_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)}: 2 or more are needed, one of each class.")


def load_defect_data(config: DefectDataConfig, only: str | None = None) -> dict[str, list[Example]]:
    """Read, check, de-duplicate and subsample the data.

    Args:
        config: selects the data.
        only: the one split to read, "validation" or "test", to score it; None: all.

    Returns:
        The functions of each split: "train" unless `only` is given, "validation" and "test" if the data has them.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged, rows lack a text or a label 0 or 1, a split is empty, or all training
            functions have one class.
    """
    train = only is None
    if config.dataset_name is not None:
        splits = {
            split: read_examples(
                ((f"{config.dataset_name}, {split} row {i}", row) for i, row in enumerate(rows, 1)), config
            )
            for split, rows in load_splits(config, ["train"] if train else [], only).items()
            if only in (None, split)
        }
    elif files := config.files:
        if train and "train" not in files:
            raise ValueError(f"train_file=None: a training run needs one beside {', '.join(files)}.")
        splits = {
            split: read_examples(json_lines(path), config) for split, path in files.items() if only in (None, split)
        }
    else:
        settings = (config.sample_seed, config.min_characters, config.max_characters, config.defect_kinds)
        splits = load_python_defects(*settings)
        splits = {split: examples for split, examples in splits.items() if only in (None, split)}
    if train and config.deduplicate:
        splits["train"] = _deduplicated(splits)
    for split, examples in splits.items():
        if not examples:
            raise ValueError(f"the {split} split is empty, or nothing of it is left. Give it more functions.")
        if split == "train" and len({example.target for example in examples}) == 1:
            label = examples[0].target
            raise ValueError(f"all {len(examples)} training functions have the label {label}. Give both classes.")
        limit = config.max_train_samples if split == "train" else config.max_eval_samples
        splits[split] = _subsample(examples, limit, config.sample_seed)
    return splits


def read_examples(rows: Iterator[tuple[str, Any]], config: DefectDataConfig) -> list[Example]:
    """The functions of rows, or of JSON lines, each with its place. An integer `idx` is kept."""
    text, label = config.text_column_name, config.label_column_name

    def example(row: Any) -> Example:
        func, target = (row.get(text), row.get(label)) if isinstance(row, Mapping) else (None, None)
        if not isinstance(func, str) or not func.strip() or target not in (0, 1):  # false and true are 0 and 1, too
            raise ValueError(f"{brief(row)} has no text in {text!r}, or no label 0 or 1 in {label!r}")
        func.encode()  # JSON can spell half a surrogate pair, which tokenizers refuse
        idx = row.get("idx")
        return Example(func, int(target), idx=idx if isinstance(idx, int) else None)

    return list(checked(rows, example))


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
    clean, defective = ([i for i, each in enumerate(examples) if each.target == target] for target in (0, 1))
    count = round(limit * len(defective) / len(examples))
    if clean and defective:
        count = min(max(count, 1), limit - 1)
    # The same seed for both classes keeps pairs together: in the embedded data, the n-th clean and the n-th defective
    # function are a pair.
    for of_class in (clean, defective):
        Random(seed).shuffle(of_class)
    return [examples[index] for index in sorted(clean[: limit - count] + defective[:count])]


def in_batches(examples: Sequence[Example]) -> Iterator[list[str]]:
    """Texts for calls of the tokenizer: enough for its threads, bounded in memory, with a bar."""
    for start in tqdm(range(0, len(examples), 1000), desc="tokenising", unit="thousand", leave=False, delay=5):
        yield [example.func for example in examples[start : start + 1000]]


def audit(splits: Mapping[str, Sequence[Example]], filled: Mapping[str, float], max_length: int) -> dict[str, Any]:
    """Count what can make scores misleading: imbalance, copies, contradictory labels, truncation.

    Args:
        splits: the functions of each split, none empty.
        filled: for each split, the share of functions of `max_length` or more tokens.
        max_length: number of tokens that the model sees.

    Returns:
        Numbers for `json.dump`: of each split, and over all splits. `duplicates` repeat an earlier example;
        `conflicting_labels` are distinct functions with both labels, `cross_split_copies` those in two splits.
    """
    functions = {split: {_identity(example) for example in examples} for split, examples in splits.items()}
    statistics = {}
    for split, examples in splits.items():
        size, positives = len(examples), sum(example.target for example in examples)
        statistics[split] = {
            "examples": size,
            "positives": positives,
            "majority_share": max(positives, size - positives) / size,
            "duplicates": size - len(functions[split]),
            "conflicting_labels": len(_conflicting(examples)),
            "fill_max_length": filled[split],
        }
    return {
        "max_length": max_length,
        "splits": statistics,
        "conflicting_labels": len(_conflicting([e for examples in splits.values() for e in examples])),
        "cross_split_copies": {f"{a}/{b}": len(functions[a] & functions[b]) for a, b in combinations(splits, 2)},
    }


def format_audit(report: Mapping[str, Any]) -> str:
    """Format the result of `audit` as a table for the terminal, with one row for each split."""
    header = ["split", "examples", "defective", "majority", "duplicates", "both labels"]
    rows = [[*header, f"≥ {report['max_length']} tokens"]]
    for split, numbers in report["splits"].items():
        cells = (f"{value:.2%}" if isinstance(value, float) else str(value) for value in numbers.values())
        rows.append([split, *cells])
    copies = ", ".join(f"{pair} {count}" for pair, count in report["cross_split_copies"].items())
    return (
        f"{format_table(rows)}\n"
        f"functions in two splits: {copies or 'only one split'}\n"
        f"functions with both labels, over all splits: {report['conflicting_labels']}"
    )
