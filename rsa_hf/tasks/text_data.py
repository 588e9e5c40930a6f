"""The texts of language modelling: read from files, the Hub or the embedded text, and split."""

import random
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from rsa_hf.tasks import data_files


@dataclass
class LanguageModelingDataConfig(data_files.DataSource):
    """The texts of language modelling, and how they are cut into blocks.

    Without files and `dataset_name`, the text is embedded: source files of Python's standard library, which need no
    download and are comparable only under one Python version.
    """

    text_column_name: str = HfArg(default="text", help="Column or field of the text, to which a line end is added.")
    block_size: int = HfArg(default=256, help="Tokens of a block, at least 2.")
    carry_memory: bool = HfArg(
        default=False,
        help="Read consecutive segments and carry the memory of Transformer-XL and recurrent networks along them.",
    )
    eval_block_size: int | None = HfArg(default=None, help="Tokens of a block in evaluation; default block_size.")
    eval_memory: dict[str, Any] | str | None = HfArg(
        default=None,
        help="Entries of the model's config that differ in evaluation, such as mem_len; with carry_memory.",
    )
    stride: int | None = HfArg(
        default=None,
        help="Step between evaluation blocks, in tokens; the overlap is context. Default: block size − 1.",
    )
    max_train_bytes: int | None = HfArg(default=None, help="Bytes of training text to read, up to a line end.")
    max_eval_bytes: int | None = HfArg(default=None, help="As max_train_bytes, for validation and for test.")
    validation_split_percentage: float = HfArg(default=5, help="Percent of the training text for validation.")
    test_split_percentage: float = HfArg(default=5, help="Percent for testing, if no validation text is given either.")
    streaming: bool = HfArg(
        default=False,
        help="Read the training text piece by piece, and train on its blocks in order; needs a validation text.",
    )
    count_line_ends_as_words: bool = HfArg(default=False, help="Count line ends, as published WikiText figures do.")
    sample_seed: int = HfArg(default=0, help="Seed of the order of the embedded files.")

    def __post_init__(self) -> None:
        super().__post_init__()
        stride, validation, test = self.stride, self.validation_split_percentage, self.test_split_percentage
        has_validation = self.dataset_name is not None or "validation" in self.files
        if self.streaming and (self.carry_memory or not has_validation):
            raise ValueError("streaming=True: needs a dataset_name or a validation_file, and no carry_memory.")
        if self.eval_memory and not self.carry_memory:
            raise ValueError(f"eval_memory={self.eval_memory}: has no effect without carry_memory. Set it to true.")
        if min(self.block_size, self.evaluation_block_size) < 2:
            raise ValueError(f"block_size={self.block_size}, eval_block_size={self.eval_block_size}: at least 2.")
        if stride is not None and (self.carry_memory or not 1 <= stride < self.evaluation_block_size):
            raise ValueError(f"stride={stride}: from 1 to {self.evaluation_block_size - 1}, not with carry_memory.")
        if not 0 < validation < 100 - test <= 100:
            shares = f"validation_split_percentage={validation}, test_split_percentage={test}"
            raise ValueError(f"{shares}: the first must be above 0, the second at least 0, their sum below 100.")
        for path in self.files.values():
            if data_files.kind_of_file(path) in (".csv", ".tsv", ".parquet", ".arrow", ".tar", ".zip", ".tgz"):
                raise ValueError(f"{path}: a text or JSON lines (.jsonl) are needed. Convert it.")

    @property
    def evaluation_block_size(self) -> int:
        """`eval_block_size`, or `block_size` if it is None."""
        return self.block_size if self.eval_block_size is None else self.eval_block_size


def read_texts(config: LanguageModelingDataConfig, only: str | None = None) -> dict[str, bytes]:
    """The bytes of each split, or `only` one, cut to the limits: train (unless streamed), validation, perhaps test."""
    if config.dataset_name is None and not config.files:
        texts = _read_embedded(config)
    else:
        chunks = _chunks(config, only)
        if config.streaming:
            chunks.pop("train", None)
        texts = {split: b"".join(parts) for split, parts in chunks.items()}
        if "train" in texts:
            texts = _split_in_order(texts, config)
    texts = texts if only is None else {split: text for split, text in texts.items() if split == only}
    for split, text in texts.items():
        option = "max_train_bytes" if split == "train" else "max_eval_bytes"
        limit = getattr(config, option)
        texts[split] = text if limit is None else text[: line_boundary(text, 0, limit)]
        if not texts[split]:
            cut = f", {option}={limit}" if text else ""
            raise ValueError(f"nothing is left of the {split} text ({len(text)} bytes{cut}). Give more.")
    return texts


def stream_training_text(config: LanguageModelingDataConfig) -> Iterator[bytes]:
    """The training text of a configuration with `streaming`, in pieces."""
    chunks = _chunks(config, "train")["train"]
    return chunks if config.max_train_bytes is None else _cut_at_line(chunks, config.max_train_bytes)


def _chunks(config: LanguageModelingDataConfig, only: str | None) -> dict[str, Iterator[bytes]]:
    """The texts of files or of a data set on the Hub, each in pieces; of `only` one split if it has its own text."""
    column = config.text_column_name
    sources = data_files.sources_of(config, only, streaming=config.streaming)
    if config.dataset_name is None:
        return {split: _file_chunks(path, column) for split, path in sources.items()}
    for split, rows in sources.items():
        if rows.column_names is not None and column not in rows.column_names:
            raise ValueError(
                f"text_column_name={column!r}: the {split} split of {config.dataset_name} has the columns "
                f"{', '.join(rows.column_names)}."
            )
    name = config.dataset_name
    return {
        split: _documents(data_files.numbered(f"{name}, {split} row", rows.select_columns(column)), column)
        for split, rows in sources.items()
    }


def _file_chunks(path: str, field: str) -> Iterator[bytes]:
    if data_files.kind_of_file(path) in (".jsonl", ".jsonlines", ".jl", ".ndjson", ".json"):
        yield from _documents(data_files.read_table(path), field)
        return
    with data_files.open_compressed(path) as file:
        while piece := file.read(2**16):
            yield piece


def _documents(rows: Iterable[tuple[str, Any]], field: str) -> Iterator[bytes]:
    """The texts of rows, each with its place."""

    def document(row: Any) -> bytes:
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise ValueError(f"no text in the field {field!r}; text_column_name names another")
        return _with_line_end(row[field]).encode()

    yield from data_files.checked(rows, document)


def _with_line_end(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _read_embedded(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    unique: dict[str, None] = {}  # identical files could end up in two splits
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            with tokenize.open(path) as stream:  # follows Python's rule for the encoding of a source file
                unique[_with_line_end(stream.read())] = None
    sources = list(unique)
    random.Random(config.sample_seed).shuffle(sources)
    num_validation = max(1, round(len(sources) * config.validation_split_percentage / 100))
    num_test = max(1, round(len(sources) * config.test_split_percentage / 100)) if config.test_split_percentage else 0
    end = len(sources) - num_test
    begin = end - num_validation
    parts = {"train": sources[:begin], "validation": sources[begin:end], "test": sources[end:]}
    return {split: "".join(part).encode() for split, part in parts.items() if part}


def _split_in_order(texts: dict[str, bytes], config: LanguageModelingDataConfig) -> dict[str, bytes]:
    """Cut the missing validation and test texts from the end of the training text."""
    if "validation" in texts:
        return texts
    text = texts["train"]
    test_share = 0.0 if "test" in texts else config.test_split_percentage / 100
    ends = (1 - config.validation_split_percentage / 100 - test_share, 1 - test_share)
    first, second = (_character_boundary(text, round(len(text) * end)) for end in ends)
    parts = {"train": text[:first], "validation": text[first:second]}
    return {**texts, **parts, **({"test": text[second:]} if test_share else {})}


def _character_boundary(text: bytes | bytearray, position: int) -> int:
    """The last boundary of a UTF-8 character at or before a position; for other bytes, the position itself."""
    for candidate in range(position, max(position - 4, -1), -1):
        if candidate == len(text) or text[candidate] & 0xC0 != 0x80:
            return candidate
    return position


def line_boundary(text: bytes | bytearray, start: int, limit: int) -> int:
    """The end of a piece of at most `limit` bytes: after a line end if there is one, else after a character."""
    end = start + limit
    if end >= len(text):
        return len(text)
    return text.rfind(b"\n", start, end) + 1 or _character_boundary(text, end)


def _cut_at_line(chunks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """`text[: line_boundary(text, 0, limit)]` for a text in chunks."""
    passed, held = 0, b""  # length of the lines yielded so far; the bytes after them
    for chunk in chunks:
        held += chunk
        if passed + len(held) > limit:
            end = held.rfind(b"\n", 0, limit - passed) + 1
            yield held[: end if end or passed else _character_boundary(held, limit)]
            return
        end = held.rfind(b"\n") + 1
        yield held[:end]
        passed, held = passed + end, held[end:]
    yield held
