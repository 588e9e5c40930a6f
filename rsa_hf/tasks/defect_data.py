"""Where the functions of defect detection come from: embedded, Hub or files; checked, de-duplicated, subsampled."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import datasets

from rsa_hf.tasks.python_defects import Example, check_options, load_python_defects
from rsa_hf.utils.brief import brief

__all__ = ["SPLITS", "DefectDataConfig", "Example", "conflicting", "identity", "load_defect_data", "read_json_lines"]

SPLITS = ("train", "validation", "test")
_OPENERS: dict[str, Callable[..., Any]] = {".jsonl": open, ".jsonl.gz": gzip.open, ".jsonl.xz": lzma.open}

Source = Literal["embedded", "hub", "files"]
LongFunctions = Literal["truncate", "chunk"]


@dataclass
class DefectDataConfig:
    """Where the functions come from and how they are cut to the model's length.

    Attributes:
        source: "embedded" (functions of the installed Python's standard library with injected defects: needs no
            download), "hub" or "files".
        train_file: For "files": the training functions, as JSON lines with the fields `func` and `target`
            (`.jsonl`, `.jsonl.gz` or `.jsonl.xz`).
        validation_file: For "files": the same for validation; may be left out.
        test_file: For "files": the same for testing; may be left out.
        hub_dataset: For "hub": the data set's name; its columns are `func` and `target`.
        max_train_examples: Keep at most so many training functions, chosen at random with the classes in
            proportion. None keeps all.
        max_eval_examples: The same for validation and test, each.
        deduplicate: Drop training functions that repeat another one (up to whitespace), that carry both
            labels, or that also stand in validation or test. Validation and test stay as they are, so scores
            stay comparable.
        max_length: Tokens of an input, special tokens included.
        long_functions: "truncate" keeps the beginning of a longer function, "chunk" cuts it into windows.
        chunk_overlap: For "chunk": tokens that a window shares with the one before.
        min_characters: For "embedded": shortest function.
        max_characters: For "embedded": longest function.
        defect_kinds: For "embedded": the defects to inject, of `python_defects.DEFECT_KINDS`; None for all.
        seed: Chooses the embedded defects and what `max_…_examples` keep. Runs that are compared should share
            it.

    Raises:
        ValueError: A value is outside what is described here.
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
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        for split in SPLITS:
            file = getattr(self, f"{split}_file")
            if file is not None and self.source != "files":
                raise ValueError(
                    f"{split}_file is {file!r}, which source {self.source!r} does not read; "
                    f"set source to 'files' or leave {split}_file out"
                )
        if self.source == "files" and self.train_file is None:
            raise ValueError("train_file is None; source 'files' needs the path of the training functions")
        for name in ("max_train_examples", "max_eval_examples"):
            limit = getattr(self, name)
            if limit is not None and limit < 2:
                raise ValueError(f"{name} is {limit}; choose 2 or more, one of each class, or None to keep all")
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; choose 1 or more tokens")
        if self.long_functions == "chunk" and not 0 <= self.chunk_overlap < self.max_length:
            raise ValueError(
                f"chunk_overlap is {self.chunk_overlap}; choose from 0 to below max_length ({self.max_length})"
            )
        check_options(self.min_characters, self.max_characters, self.defect_kinds)


def load_defect_data(config: DefectDataConfig) -> dict[str, list[Example]]:
    """Read, check, de-duplicate and subsample the data.

    Args:
        config: What to read and what to keep.

    Returns:
        The functions of each split: "train" always, "validation" and "test" where the source has them.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file is damaged, a row is not a function with a label 0 or 1, a split is empty, or the
            training split has one class only.
    """
    if config.source == "embedded":
        splits = load_python_defects(
            seed=config.seed,
            min_characters=config.min_characters,
            max_characters=config.max_characters,
            kinds=config.defect_kinds,
        )
    elif config.source == "hub":
        splits = _read_hub(config.hub_dataset)
    else:
        files = {split: getattr(config, f"{split}_file") for split in SPLITS}
        splits = {split: read_json_lines(file) for split, file in files.items() if file is not None}
    if config.deduplicate:
        splits["train"] = _deduplicated(splits)
    for split, examples in splits.items():
        if not examples:
            raise ValueError(
                f"the {split} split is empty; give it functions"
                + (", or widen min_characters and max_characters" if config.source == "embedded" else "")
                + (" that are not all copies or conflicting" if split == "train" and config.deduplicate else "")
            )
    classes = {example.target for example in splits["train"]}
    if len(classes) == 1:
        raise ValueError(
            f"all {len(splits['train'])} training functions have target {classes.pop()}; "
            "give functions of both classes, clean (0) and defective (1)"
        )
    limits = {"train": config.max_train_examples}
    return {
        split: _subsample(examples, limits.get(split, config.max_eval_examples), config.seed)
        for split, examples in splits.items()
    }


def read_json_lines(path: str | Path) -> list[Example]:
    """Read functions from JSON lines; blank lines are passed over.

    Args:
        path: A `.jsonl`, `.jsonl.gz` or `.jsonl.xz` file. Each line is an object with the fields `func`, the
            source text, and `target`, its label 0 or 1 (or false or true); other fields are ignored.

    Returns:
        The functions, in the order of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the name has another ending, the file is truncated or corrupt, or a line is not such an
            object. The message names the file and the line.
    """
    path = Path(path)
    opener = next((opener for suffix, opener in _OPENERS.items() if path.name.endswith(suffix)), None)
    if opener is None:
        raise ValueError(f"{path} has another ending than {', '.join(_OPENERS)}; rename or convert it")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give the path of existing JSON lines")
    examples = []
    number = 0
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    examples.append(_checked(_parsed(line, where), where))
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(
            f"{path}, line {number + 1}: the file is truncated or corrupt from here on ({error}); "
            "copy or download it again"
        ) from error
    return examples


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{where}: not valid JSON ({error}); write one object a line") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deep; write one flat object a line") from error


def _read_hub(name: str) -> dict[str, list[Example]]:
    loaded = datasets.load_dataset(name)
    if "train" not in loaded:
        raise ValueError(f"{name} has the splits {', '.join(loaded)}; a data set with a split 'train' is needed")
    return {
        split: [_checked(row, f"{name}, {split} row {i}") for i, row in enumerate(loaded[split])]
        for split in SPLITS
        if split in loaded
    }


def _checked(row: Any, where: str) -> Example:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {type(row).__name__}; an object with `func` and `target` is needed")
    for field in ("func", "target"):
        if field not in row:
            raise ValueError(f"{where}: the field {field!r} is missing; found {brief(list(row))[1:-1]}")
    func, target = row["func"], row["target"]
    if not isinstance(func, str) or not func.strip():
        raise ValueError(f"{where}: func is {brief(func)}; the text of a function is needed, so remove or fill it")
    if not isinstance(target, int) or target not in (0, 1):  # bool is an int
        raise ValueError(f"{where}: target is {brief(target)}; allowed are 0 (clean) and 1 (defective)")
    try:
        func.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can spell and no tokenizer takes
        raise ValueError(f"{where}: func is no valid Unicode ({error.reason}); repair or remove it") from error
    return Example(func, int(target))


def identity(example: Example) -> str:
    """Returns what two copies of a function have in common: its text up to whitespace."""
    return " ".join(example.func.split())


def _deduplicated(splits: Mapping[str, Sequence[Example]]) -> list[Example]:
    evaluated = {identity(example) for split in SPLITS[1:] for example in splits.get(split, [])}
    contradicted = conflicting(splits["train"])
    kept: dict[str, Example] = {}
    for example in splits["train"]:
        function = identity(example)
        if function not in evaluated and function not in contradicted:
            kept.setdefault(function, example)
    return list(kept.values())


def conflicting(examples: Sequence[Example]) -> set[str]:
    """Returns the functions that carry both labels."""
    labels = defaultdict(set)
    for example in examples:
        labels[identity(example)].add(example.target)
    return {function for function, targets in labels.items() if len(targets) == 2}


def _subsample(examples: list[Example], limit: int | None, seed: int) -> list[Example]:
    """Keeps `limit` examples, in order, with the classes in proportion and none of them lost."""
    if limit is None or len(examples) <= limit:
        return examples
    indices: dict[int, list[int]] = {target: [] for target in (0, 1)}
    for index, example in enumerate(examples):
        indices[example.target].append(index)
    num_positive = round(limit * len(indices[1]) / len(examples))
    if indices[0] and indices[1]:
        num_positive = min(max(num_positive, 1), limit - 1)
    kept = []
    for target, count in ((0, limit - num_positive), (1, num_positive)):
        # The same generator for both classes: in the embedded data the n-th clean and the n-th defective
        # function are a pair, and so the pairs stay together.
        Random(seed).shuffle(indices[target])
        kept += indices[target][:count]
    return [examples[index] for index in sorted(kept)]
