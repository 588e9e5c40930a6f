"""Where the text of a language model comes from: Hub sets, files, bytes, or Python's own standard library."""

from __future__ import annotations

import gzip
import lzma
import random
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

from rsa_hf.utils.checks import check_integer

__all__ = [
    "SPLITS",
    "LanguageModelingDataConfig",
    "check_block_shape",
    "line_boundary",
    "read_texts",
    "stream_training_text",
]

SPLITS = ("train", "validation", "test")


@dataclass
class LanguageModelingDataConfig:
    """Where the text comes from and how it is cut into blocks.

    Attributes:
        source: "embedded" (Python source of the running interpreter's standard library, without its tests:
            needs no download, split by file; comparable only under one Python version), "hub" or "files".
        files: For "files": one path for each of "train" (required), "validation" and "test"; `.txt`, `.gz` or
            `.xz`, read as bytes.
        hub_dataset: For "hub": the name of a data set, for instance "Salesforce/wikitext".
        hub_subset: For "hub": its configuration, for instance "wikitext-103-raw-v1".
        text_column: For "hub": the column of text. A row that does not end its line gets a line end.
        block_size: Tokens in a block, at least 2.
        carry_memory: For models that carry something from segment to segment (Transformer-XL, recurrent networks):
            train on consecutive segments of `block_size` tokens, one text a row, and keep what the model remembers
            from step to step and in evaluation. False: blocks are trained on one by one, in random order.
        eval_block_size: The block or segment size in evaluation; None: `block_size`.
        eval_memory: Entries of the model's config that are set otherwise in evaluation, such as `mem_len` of
            Transformer-XL, for a longer memory than in training. With `carry_memory`.
        stride: For evaluation: tokens from one block's start to the next, 1 … block size − 1; the tokens that
            a block repeats are context, scored only once. None: block size − 1, the fewest blocks in which
            each block's first new token is still predicted from the one before it. Not with `carry_memory`, whose
            segments have their context in memory.
        max_train_bytes: Keep at most so many bytes of the training text, in order, cut after a line end (in a
            line too long for that, between two characters). None keeps all.
        max_eval_bytes: The same for the validation and the test text, each.
        validation_fraction: The share cut off for validation where the source has none.
        test_fraction: The share cut off for testing where the source has neither validation nor test, 0 for
            none. For "hub" and "files" both shares are bytes from the end of the training text, in order (the
            defaults are enwik8's usual 90/5/5); for "embedded", shares of the shuffled files.
        streaming: Read the training text piece by piece whenever it is needed, so that it need not be downloaded or
            fit in memory. Its blocks are then trained on in order, not shuffled. For "hub" and "files" with a
            validation text of their own.
        count_line_ends_as_words: Count each line end as a word, as published WikiText perplexities do.
        seed: Shuffles the files of "embedded"; the other sources keep their order.

    Raises:
        ValueError: A value is outside what is described here, or belongs to another source.
    """

    source: str = "embedded"
    files: dict[str, str] = field(default_factory=dict)
    hub_dataset: str | None = None
    hub_subset: str | None = None
    text_column: str = "text"
    block_size: int = 256
    carry_memory: bool = False
    eval_block_size: int | None = None
    eval_memory: dict[str, Any] = field(default_factory=dict)
    stride: int | None = None
    max_train_bytes: int | None = None
    max_eval_bytes: int | None = None
    validation_fraction: float = 0.05
    test_fraction: float = 0.05
    streaming: bool = False
    count_line_ends_as_words: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.source not in _READERS:
            raise ValueError(f"source is {self.source!r}; set it to one of {list(_READERS)}")
        for name, owner in (("files", "files"), ("hub_dataset", "hub"), ("hub_subset", "hub")):
            if getattr(self, name) and self.source != owner:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} but source {self.source!r} does not read it; "
                    f"set source to {owner!r} or leave {name} out"
                )
        if self.source == "hub" and not self.hub_dataset:
            raise ValueError(f"hub_dataset is {self.hub_dataset!r}; source 'hub' needs a data set's name")
        if self.source == "files" and "train" not in self.files:
            raise ValueError(f"files has {list(self.files)}; source 'files' needs a path for 'train'")
        if self.streaming and (
            self.source == "embedded" or (self.source == "files" and "validation" not in self.files)
        ):
            raise ValueError(
                f"streaming is {self.streaming} but source {self.source!r} "
                + ("is made in memory" if self.source == "embedded" else "has no file for 'validation'")
                + "; a stream has no end to cut a validation text from: give one, or set streaming to false"
            )
        if unknown := [split for split in self.files if split not in SPLITS]:
            raise ValueError(f"files has {unknown}; allowed are {list(SPLITS)}: rename or remove them")
        check_block_shape(self.block_size, None)
        check_block_shape(
            self.evaluation_block_size,
            self.stride,
            "block_size" if self.eval_block_size is None else "eval_block_size",
        )
        self._require_memory_to_fit()
        for name in ("max_train_bytes", "max_eval_bytes"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, 0)
        for name, allowed, is_allowed in (
            ("validation_fraction", "above 0 and below 1", 0 < self.validation_fraction < 1),
            (
                "test_fraction",
                f"from 0 to below {1 - self.validation_fraction:g}, so that validation_fraction and it leave "
                "some text for training",
                0 <= self.test_fraction < 1 - self.validation_fraction,
            ),
        ):
            if not is_allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose a number {allowed}")

    @property
    def evaluation_block_size(self) -> int:
        """`eval_block_size`, or `block_size` where it is None."""
        return self.block_size if self.eval_block_size is None else self.eval_block_size

    def _require_memory_to_fit(self) -> None:
        if self.eval_memory and not self.carry_memory:
            raise ValueError(
                f"eval_memory is {self.eval_memory} but carry_memory is {self.carry_memory}: nothing is remembered; "
                "set carry_memory to true, or leave eval_memory out"
            )
        if self.carry_memory and self.stride is not None:
            raise ValueError(
                f"stride is {self.stride} but carry_memory is {self.carry_memory}: the memory is a segment's context, "
                "and no token is read twice; leave stride out, or set carry_memory to false"
            )
        if self.carry_memory and self.streaming:
            raise ValueError(
                f"streaming is {self.streaming} and carry_memory too, but a stream has no known length to cut into "
                "tracks; set one of them to false"
            )


def check_block_shape(block_size: int, stride: int | None, name: str = "block_size") -> None:
    """Raise a ValueError where blocks of this size, so named, and stride cannot cover a text."""
    check_integer(name, block_size, 2)
    if stride is not None:  # a block's first token has no context, so at least one token is repeated
        check_integer("stride", stride, 1, block_size - 1)


def _file_chunks(path: Path) -> Iterator[bytes]:
    openers: dict[str, Callable[..., Any]] = {".txt": open, ".gz": gzip.open, ".xz": lzma.open}
    if path.suffix not in openers:
        raise ValueError(f"{path} ends in {path.suffix!r}; allowed are {list(openers)}: rename or convert it")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give the path of an existing text file")
    lines, empty = 0, True
    with openers[path.suffix](path, "rb") as stream:
        try:
            while chunk := stream.read(2**16):
                empty = False
                lines += chunk.count(b"\n")
                yield chunk
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise ValueError(
                f"{path} is corrupt or truncated: reading stopped after line {lines} ({error}); "
                "make or fetch the file again"
            ) from error
    if empty:
        raise ValueError(f"{path} is empty; a text of at least two tokens is needed")


def _read_files(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    splits = [split for split in config.files if not (config.streaming and split == "train")]
    return _split_in_order({split: b"".join(_file_chunks(Path(config.files[split]))) for split in splits}, config)


def _load_hub(config: LanguageModelingDataConfig) -> Any:
    loaded = datasets.load_dataset(config.hub_dataset, config.hub_subset, streaming=config.streaming)
    for needed in ("train", "validation") if config.streaming else ("train",):
        if needed not in loaded:
            raise ValueError(
                f"hub_dataset {config.hub_dataset!r} has splits {list(loaded)}, but {needed!r} is needed"
                + ("; set streaming to false, or choose another" if needed == "validation" else "; choose another")
            )
    return loaded


def _hub_rows(loaded: Any, split: str, config: LanguageModelingDataConfig) -> Iterator[bytes]:
    name, column = config.hub_dataset, config.text_column
    columns = loaded[split].column_names  # a stream may not know
    if columns is not None and column not in columns:
        raise ValueError(f"text_column is {column!r}; {name!r} has the columns {columns}: choose one")
    for index, row in enumerate(loaded[split][column]):
        if not isinstance(row, str):
            raise ValueError(f"row {index} of {split} in {name!r} is {row!r}; choose a column of strings")
        yield _with_line_end(row).encode()


def _read_hub(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    loaded = _load_hub(config)
    splits = [split for split in SPLITS if split in loaded and not (config.streaming and split == "train")]
    return _split_in_order({split: b"".join(_hub_rows(loaded, split, config)) for split in splits}, config)


def _read_embedded(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    unique: dict[str, None] = {}  # equal files could otherwise stand in two splits
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            with tokenize.open(path) as stream:  # knows Python's rule for a file's encoding
                unique[_with_line_end(stream.read())] = None
    sources = list(unique)
    if len(sources) < len(SPLITS):
        raise ValueError(f"{root} has {len(sources)} Python source files; use source 'files' or 'hub'")
    random.Random(config.seed).shuffle(sources)
    num_validation = max(1, round(len(sources) * config.validation_fraction))
    num_test = max(1, round(len(sources) * config.test_fraction)) if config.test_fraction else 0
    num_train = len(sources) - num_validation - num_test
    parts = {
        "train": sources[:num_train],
        "validation": sources[num_train : num_train + num_validation],
        "test": sources[num_train + num_validation :],
    }
    return {split: "".join(part).encode() for split, part in parts.items() if part}


_READERS: dict[str, Callable[[LanguageModelingDataConfig], dict[str, bytes]]] = {
    "embedded": _read_embedded,
    "hub": _read_hub,
    "files": _read_files,
}


def _split_in_order(texts: dict[str, bytes], config: LanguageModelingDataConfig) -> dict[str, bytes]:
    if "validation" in texts:
        return texts
    text = texts["train"]
    test_fraction = 0.0 if "test" in texts else config.test_fraction
    ends = (1 - config.validation_fraction - test_fraction, 1 - test_fraction)
    first, second = (_character_boundary(text, round(len(text) * end)) for end in ends)
    parts = {"train": text[:first], "validation": text[first:second]}
    return {**texts, **parts, "test": text[second:]} if test_fraction else {**texts, **parts}


def _with_line_end(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _character_boundary(text: bytes | bytearray, position: int) -> int:
    """The last boundary of a UTF-8 character at or before a position; that position in other bytes."""
    for candidate in range(position, max(position - 4, -1), -1):
        if candidate == len(text) or text[candidate] & 0xC0 != 0x80:
            return candidate
    return position


def line_boundary(text: bytes | bytearray, start: int, limit: int) -> int:
    """Where to end a piece of at most `limit` bytes: after a line end, else after a character."""
    end = start + limit
    if end >= len(text):
        return len(text)
    return text.rfind(b"\n", start, end) + 1 or _character_boundary(text, end)


def read_texts(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    """Read the texts of a configuration and cut them to its limits.

    Args:
        config: Where the text comes from, and how much of it is kept.

    Returns:
        The bytes of each split: train (not where it is streamed), validation and, where there is one, test.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file or data set cannot be used, or nothing is left of a split.
    """
    texts = _READERS[config.source](config)
    for split, text in texts.items():
        option = "max_train_bytes" if split == "train" else "max_eval_bytes"
        limit = getattr(config, option)
        texts[split] = text if limit is None else text[: line_boundary(text, 0, limit)]
        if not texts[split]:
            raise ValueError(
                f"nothing is left of the {split} text ({len(text)} bytes, {option} {limit}); "
                f"raise {option}, or give more text or a larger fraction"
            )
    return texts


def stream_training_text(config: LanguageModelingDataConfig) -> Iterator[bytes]:
    """The training text of a configuration with `streaming`, in pieces: together the bytes that `read_texts` gives.

    Args:
        config: Where the text comes from; `max_train_bytes` counts.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file or data set cannot be used.
    """
    if config.source == "files":
        chunks = _file_chunks(Path(config.files["train"]))
    else:
        chunks = _hub_rows(_load_hub(config), "train", config)
    return chunks if config.max_train_bytes is None else _cut_at_line(chunks, config.max_train_bytes)


def _cut_at_line(chunks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """`text[: line_boundary(text, 0, limit)]` of a text that comes in chunks."""
    passed, held = 0, b""  # whole lines that were given away; what follows them
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
