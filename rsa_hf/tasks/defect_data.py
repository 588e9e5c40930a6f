"""The data of defect detection: read from the embedded set, the Hub or files, split, de-duplicated and subsampled.

Functions are the same if their texts agree up to the length of whitespace.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Any, Literal, get_args

from transformers.hf_argparser import HfArg

from rsa_hf.tasks import data_files
from rsa_hf.tasks.python_defects import Example, load_python_defects
from rsa_hf.utils.text import brief

# Column names of published data sets, of which the first that is present is used: Devign, DiverseVul and PrimeVul
# (func, target, idx), BigVul (func_before, vul, func_after), ReVeal (code, label).
TEXT_COLUMNS, LABEL_COLUMNS = ("func", "func_before", "code"), ("target", "vul", "label")
NUMBER_COLUMNS = ("idx", "id")
_WHOLE, _NUMBER = re.compile(r"(0|-?[1-9][0-9]{0,17})(\.0)?"), re.compile(r"-?[0-9]+(\.[0-9]+)?")
CLEAN, DEFECTIVE = ("0", "false"), ("1", "true")  # labels as words, in upper or lower case
SplitBy = Literal["random", "project", "time"]
LongFunctions = Literal["truncate", "chunk"]


@dataclass
class DefectDataConfig(data_files.DataSource):
    """The data of defect detection, and how functions are cut to the model's length.

    Without files and `dataset_name`, the data is embedded: functions of Python's standard library with injected
    defects, which needs no download. Labels are 0 or 1, false or true, or these in words.

    Raises:
        ValueError: a value is not allowed.
    """

    text_column_name: str | None = HfArg(
        default=None, help="Column or field with the text of a function. Default: func, func_before or code."
    )
    label_column_name: str | None = HfArg(
        default=None, help="Column or field with its label: 1 if it is defective. Default: target, vul or label."
    )
    label_values: list[str] | None = HfArg(
        default=None, help="Labels in words: of a clean and of a defective function, such as safe vulnerable."
    )
    fixed_column_name: str | None = HfArg(
        default=None,
        help="Column with the corrected text of a defective function, such as func_after of BigVul: a clean function "
        "beside it.",
    )
    paired: bool = HfArg(
        default=False,
        help="Consecutive rows are pairs: a function with and without its defect, as in the files of PrimeVul.",
    )
    split_by: SplitBy | None = HfArg(
        default=None,
        help="Make the splits that are not given from the training functions: at random, by whole projects, or in the "
        "order of time, the newest for testing. Pairs stay together.",
    )
    project_column_name: str = HfArg(default="project", help="Column or field with the project of a function.")
    time_column_name: str | None = HfArg(
        default=None, help="Column with a time, as a number or as text that sorts by time, such as 2019-05-02."
    )
    validation_split_percentage: float = HfArg(default=10, help="Percent of the functions for validation.")
    test_split_percentage: float = HfArg(default=10, help="Percent of the functions for testing.")
    max_train_samples: int | None = HfArg(
        default=None, help="Most training functions to use, at random with the classes in proportion; default all."
    )
    max_eval_samples: int | None = HfArg(default=None, help="As max_train_samples, for validation and for test.")
    deduplicate: bool = HfArg(
        default=True,
        help="Drop training functions that repeat another one (up to the length of whitespace), carry both labels, or "
        "also occur in validation or test, which stay as they are.",
    )
    max_seq_length: int = HfArg(default=256, help="Tokens of an input, with special tokens.")
    long_functions: LongFunctions = HfArg(
        default="truncate",
        help="truncate keeps the beginning of a longer function, chunk cuts it into overlapping windows.",
    )
    chunk_overlap: int = HfArg(default=64, help="For chunk: tokens that neighbouring windows share.")
    class_weights: bool = HfArg(default=False, help="Weight the loss so that each class has the same total weight.")
    min_characters: int = HfArg(default=60, help="Embedded data: length of the shortest function.")
    max_characters: int = HfArg(default=400, help="Embedded data: length of the longest function.")
    defect_kinds: list[str] | None = HfArg(default=None, help="Embedded data: kinds of defect; default all.")
    sample_seed: int = HfArg(default=0, help="Seed of the embedded defects, of split_by and of max_*_samples.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in {"split_by": get_args(SplitBy), "long_functions": get_args(LongFunctions)}.items():
            if getattr(self, name) not in (None, *allowed):
                raise ValueError(f"{name}={getattr(self, name)!r}: choose from {', '.join(allowed)}.")
        for name in ("max_train_samples", "max_eval_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)}: 2 or more are needed, one of each class.")
        if self.label_values is not None and len(set(self.label_values)) != 2:
            raise ValueError(f"label_values={self.label_values}: two are needed, of clean and defective functions.")
        if self.split_by is not None and not (self.dataset_name or self.files):
            raise ValueError(f"split_by={self.split_by!r}: the embedded data has splits of its own.")
        if self.split_by == "time" and self.time_column_name is None:
            raise ValueError("split_by='time': time_column_name is needed.")
        shares = (self.validation_split_percentage, self.test_split_percentage)
        if min(shares) <= 0 or sum(shares) >= 100:
            named = f"validation_split_percentage={shares[0]}, test_split_percentage={shares[1]}"
            raise ValueError(f"{named}: both must be above 0, their sum below 100.")


def load_defect_data(config: DefectDataConfig, only: str | None = None) -> dict[str, list[Example]]:
    """Read, check, split, de-duplicate and subsample the data.

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
    if config.dataset_name is None and not config.files:
        settings = (config.sample_seed, config.min_characters, config.max_characters, config.defect_kinds)
        splits = load_python_defects(*settings)
    else:
        sources = data_files.sources_of(config, only)
        splits = {split: read_examples(_rows(config, split, source), config) for split, source in sources.items()}
        if config.split_by is not None and "train" in splits:
            splits = _with_made_splits(splits, config)
    splits = {split: splits[split] for split in data_files.SPLITS if split in splits and only in (None, split)}
    if only is None and config.deduplicate:
        splits["train"] = _deduplicated(splits)
    for split, examples in splits.items():
        if not examples:
            copies = " without copies of the others (deduplicate)" if split == "train" and config.deduplicate else ""
            raise ValueError(f"the {split} split is empty, or nothing of it is left{copies}. Give it more functions.")
        if split == "train" and len({example.target for example in examples}) == 1:
            label = examples[0].target
            raise ValueError(f"all {len(examples)} training functions have the label {label}. Give both classes.")
        setting = "max_train_samples" if split == "train" else "max_eval_samples"
        splits[split] = subsample(examples, getattr(config, setting), config.sample_seed)
        if len(splits[split]) < len(examples):
            used = f"{len(splits[split]):,} of {len(examples):,} functions are used ({setting})"
            print(f"{split}: {used}", file=sys.stderr)
    return splits


def _rows(config: DefectDataConfig, split: str, source: Any) -> Iterator[tuple[str, Any]]:
    """The rows of a split's file or data set, each with its place."""
    if config.dataset_name is None:
        return data_files.read_table(source)
    return data_files.numbered(
        f"{config.dataset_name}, {split} row", data_files.with_names_of_classes(source, source.features)
    )


def read_examples(rows: Iterable[tuple[str, Any]], config: DefectDataConfig, labelled: bool = True) -> list[Example]:
    """The functions of rows, or of JSON lines, each with its place.

    An `idx` or `id` is kept, as a number if it is whole. Without labels, every function counts as clean.
    """
    texts = TEXT_COLUMNS if config.text_column_name is None else (config.text_column_name,)
    labels = LABEL_COLUMNS if config.label_column_name is None else (config.label_column_name,)
    given = config.label_values
    clean, defective = [(value,) for value in given] if given else (CLEAN, DEFECTIVE)

    def target_of(row: Mapping[str, Any]) -> int:
        name, value = _first_of(labels, row)
        spellings = {str(value)}
        if not (given and isinstance(value, str)):
            spellings |= {str(value).lower(), str(value).removesuffix(".0")}
        for target, allowed in enumerate((clean, defective)):
            if spellings.intersection(allowed):
                return target
        words = " or ".join(given or ("0", "1"))
        raise ValueError(f"{name} must be {words}, got {brief(value)}; label_values sets other labels")

    def text_of(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name} must be the text of a function, got {brief(value)}")
        value.encode()  # JSON can spell half a surrogate pair, which tokenizers refuse
        return value

    def read(row: Any) -> list[Example]:
        if not isinstance(row, Mapping):
            raise ValueError(f"a row must have named fields, got {brief(row)}")
        if None in row:  # where csv.DictReader puts surplus fields
            raise ValueError(f"more fields than the header has columns: {brief(row[None])}")
        func, target = text_of(*_first_of(texts, row)), target_of(row) if labelled else 0
        idx = next((str(row[name]) for name in NUMBER_COLUMNS if row.get(name) not in (None, "")), None)
        whole = idx and _WHOLE.fullmatch(idx)  # a table with gaps stores 7 as 7.0
        of_times = config.time_column_name if labelled else None
        time = None if of_times is None else _first_of((of_times,), row)[1]
        if isinstance(time, str) and _NUMBER.fullmatch(time):  # all values of a CSV are text
            time = float(time)
        if time == "" or time != time:
            raise ValueError(f"{config.time_column_name} must be a time, got {brief(time)}")
        project = row.get(config.project_column_name)
        project = "" if project is None else str(project)
        example = Example(func, target, idx=int(whole[1]) if whole else idx, project=project, time=time)
        if config.fixed_column_name is None or target == 0:
            return [example]
        fixed = text_of(*_first_of((config.fixed_column_name,), row))
        return [example, replace(example, func=fixed, target=0, idx=None, pair=0)]

    found = list(data_files.checked(rows, read))
    if config.paired and labelled:
        return _paired([example for examples in found for example in examples])
    examples = []
    for pair, members in enumerate(found):
        examples += [replace(member, pair=pair) for member in members] if len(members) == 2 else members
    return examples


def _first_of(names: Sequence[str], row: Mapping[str, Any]) -> tuple[str, Any]:
    """The first of these columns that a row has, and its value."""
    for name in names:
        if name in row:
            return name, row[name]
    raise ValueError(f"there is no column {' or '.join(map(repr, names))} among {brief(list(row))}")


def _paired(examples: Sequence[Example]) -> list[Example]:
    """Turn rows into pairs, two by two."""
    for number, (first, second) in enumerate(zip(examples[::2], examples[1::2], strict=False)):
        if {first.target, second.target} != {0, 1}:
            labels = f"{first.target} and {second.target}"
            raise ValueError(f"paired=True: the functions {2 * number + 1} and {2 * number + 2} have labels {labels}.")
    if len(examples) % 2:
        raise ValueError(f"paired=True: {len(examples)} functions are not a whole number of pairs.")
    return [replace(example, pair=number // 2) for number, example in enumerate(examples)]


def _with_made_splits(splits: Mapping[str, list[Example]], config: DefectDataConfig) -> dict[str, list[Example]]:
    """Make the missing splits from the training functions, in whole pairs or whole projects."""
    shares = {"validation": config.validation_split_percentage, "test": config.test_split_percentage}
    shares = {split: share / 100 for split, share in shares.items() if split not in splits}
    shares["train"] = 1 - sum(shares.values())
    units: dict[Any, list[Example]] = defaultdict(list)
    for number, example in enumerate(splits["train"]):
        if config.split_by == "project":
            if not example.project:
                raise ValueError(
                    f"split_by='project': function {number + 1} has no project; project_column_name names the column."
                )
            units[example.project].append(example)
        else:
            units[number if example.pair is None else ("pair", example.pair)].append(example)
    made: dict[str, list[Example]] = {split: [] for split in shares}
    size = len(splits["train"])
    if config.split_by == "time":
        place = 0
        try:
            in_order = sorted(units.values(), key=lambda unit: max(example.time for example in unit))
        except TypeError as error:
            raise ValueError(
                f"time_column_name={config.time_column_name!r}: its values have no order, {error}."
            ) from error
        ends = {"train": shares["train"], "validation": 1 - shares.get("test", 0), "test": 1.0}  # in order of time
        for unit in in_order:
            split = next(split for split in ends if split in made and place < ends[split] * size)
            made[split] += unit
            place += len(unit)
        return {**splits, **made}
    ordered = list(units.values())
    Random(config.sample_seed).shuffle(ordered)
    if config.split_by == "project":
        ordered.sort(key=len, reverse=True)  # the largest first
    for unit in ordered:  # to the split that lacks most
        made[max(shares, key=lambda split: shares[split] * size - len(made[split]))] += unit
    return {**splits, **made}


def digest_of(text: str) -> bytes:
    """A short digest that stands for a text, which may be long, in sets."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def identity(example: Example) -> bytes:
    """A digest that two functions share if they are the same."""
    return digest_of(" ".join(example.func.split()))


def conflicting(examples: Iterable[Example]) -> set[bytes]:
    """The functions that carry both labels."""
    labels = defaultdict(set)
    for example in examples:
        labels[identity(example)].add(example.target)
    return {function for function, targets in labels.items() if len(targets) == 2}


def _deduplicated(splits: Mapping[str, Sequence[Example]]) -> list[Example]:
    dropped = conflicting(splits["train"])
    dropped |= {identity(example) for split in data_files.SPLITS[1:] for example in splits.get(split, [])}
    kept: dict[bytes, Example] = {}
    for example in splits["train"]:
        if identity(example) not in dropped:
            kept.setdefault(identity(example), example)
    return list(kept.values())


def subsample(examples: list[Example], limit: int | None, seed: int) -> list[Example]:
    """Keep `limit` examples, in order, the classes in proportion, at least one of each; whole pairs if possible."""
    if limit is None or len(examples) <= limit:
        return examples
    clean, defective = ([i for i, each in enumerate(examples) if each.target == target] for target in (0, 1))
    count = round(limit * len(defective) / len(examples))
    if clean and defective:
        count = min(max(count, 1), limit - 1)
    for of_class in (clean, defective):
        Random(seed).shuffle(of_class)
    pairs = {examples[i].pair for i in defective[:count]}

    def place(index: int) -> int:  # whole pairs first, then functions without a pair
        pair = examples[index].pair
        return 1 if pair is None else 0 if pair in pairs else 2

    clean.sort(key=place)
    return [examples[index] for index in sorted(clean[: limit - count] + defective[:count])]
