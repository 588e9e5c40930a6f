"""The texts of language modelling: read from Python's standard library, the Hub or files, split and cut to size."""

from __future__ import annotations

import random
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import datasets

from rsa_hf.tasks.compressed import open_compressed
from rsa_hf.tasks.text_blocks import check_block_shape

__all__ = ["SPLITS", "LanguageModelingDataConfig", "line_boundary", "read_texts", "stream_training_text"]

SPLITS = ("train", "validation", "test")

Source = Literal["embedded", "hub", "files"]


@dataclass
class LanguageModelingDataConfig:
    """The texts of language modelling, and how they are cut into blocks.

    Args:
        source: "embedded" (source files of Python's standard library, no download; comparable only under one Python
            version), "hub" or "files".
        files: For "files": paths of "train" (required), "validation" and "test"; .txt, .gz or .xz, read as bytes.
        hub_dataset: For "hub": the data set, for instance "Salesforce/wikitext".
        hub_subset: For "hub": its configuration, for instance "wikitext-103-raw-v1".
        text_column: For "hub": the column of text. A line end is added to each row that has none.
        block_size: Number of tokens in a block, at least 2.
        carry_memory: Train and evaluate on consecutive segments and carry the model's memory from one to the next; for
            models with a memory (Transformer-XL, recurrent networks). False: independent blocks in random order.
        eval_block_size: Block or segment size in evaluation. None: `block_size`.
        eval_memory: Entries of the model's config that differ in evaluation, such as `mem_len` of Transformer-XL; with
            `carry_memory`.
        stride: Tokens from one evaluation block's start to the next, below the block size; repeated tokens are context
            and scored once. None: block size - 1, the fewest blocks. Not with `carry_memory`.
        max_train_bytes: Keep at most this many bytes of the training text, cut after a line end if possible. None:
        all.
        max_eval_bytes: The same for the validation and test texts, each.
        validation_fraction: Share of the training text that is used for validation if the source has no such text.
        test_fraction: Share used for testing if the source has neither a validation nor a test text; 0 for none. Cut
            from the end of the text in order; for "embedded", shares of the shuffled files.
        streaming: Read the training text piece by piece instead of keeping it in memory, and train on its blocks in
            order; for "hub" and "files" with a validation text.
        count_line_ends_as_words: Count each line end as a word, as published WikiText perplexities do.
        seed: Seed of the shuffling of the files of "embedded".

    Raises:
        ValueError: A value is not allowed, or belongs to another source.
    """

    source: Source = "embedded"
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
        own_validation = self.source == "hub" or (self.source == "files" and "validation" in self.files)
        rules = {
            f"source={self.source!r}: choose one of {', '.join(get_args(Source))}.": self.source in get_args(Source),
            f"files={self.files}: read only with source='files'.": not self.files or self.source == "files",
            f"hub_dataset={self.hub_dataset!r}: needed with source='hub', and read only there.": (
                bool(self.hub_dataset) == (self.source == "hub")
            ),
            f"hub_subset={self.hub_subset!r}: read only with source='hub'.": (
                self.hub_subset is None or self.source == "hub"
            ),
            f"files={self.files}: source 'files' needs 'train'; 'validation' and 'test' are allowed beside it.": (
                self.source != "files" or {"train"} <= set(self.files) <= set(SPLITS)
            ),
            "streaming=True: a stream has no end to cut a validation text from. Use source 'hub', or 'files' with "
            "'validation'.": own_validation or not self.streaming,
            f"eval_memory={self.eval_memory}: has no effect without carry_memory. Set it to true.": (
                self.carry_memory or not self.eval_memory
            ),
            f"stride={self.stride}: not with carry_memory, whose segments have their context in memory.": (
                self.stride is None or not self.carry_memory
            ),
            "streaming=True: not with carry_memory, as a stream has no known length to cut into tracks.": (
                not (self.streaming and self.carry_memory)
            ),
            f"validation_fraction={self.validation_fraction} and test_fraction={self.test_fraction}: the first must "
            "be above 0, the second at least 0, and their sum below 1.": (
                0 < self.validation_fraction < 1 - self.test_fraction <= 1
            ),
        }
        for message, holds in rules.items():
            if not holds:
                raise ValueError(message)
        check_block_shape(self.block_size)
        check_block_shape(self.evaluation_block_size, self.stride)

    @property
    def evaluation_block_size(self) -> int:
        """`eval_block_size`, or `block_size` if it is None."""
        return self.block_size if self.eval_block_size is None else self.eval_block_size


def read_texts(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    """Read the texts of a configuration and cut them to its limits.

    Args:
        config: Selects the texts and their sizes.

    Returns:
        The bytes of each split: train (unless it is streamed), validation and, if there is one, test.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file or data set cannot be used, or a split is empty.
    """
    readers = {"embedded": _read_embedded, "hub": _read_hub, "files": _read_files}
    texts = readers[config.source](config)
    for split, text in texts.items():
        option = "max_train_bytes" if split == "train" else "max_eval_bytes"
        limit = getattr(config, option)
        texts[split] = text if limit is None else text[: line_boundary(text, 0, limit)]
        if not texts[split]:
            raise ValueError(
                f"nothing is left of the {split} text ({len(text)} bytes, {option}={limit}): "
                f"raise {option}, or give more text or a larger fraction"
            )
    return texts


def stream_training_text(config: LanguageModelingDataConfig) -> Iterator[bytes]:
    """The training text of a configuration with `streaming`, in pieces. Joined, they are the text of `read_texts`.

    Args:
        config: Selects the text and its size.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file or data set cannot be used.
    """
    if config.source == "files":
        chunks = _file_chunks(config.files["train"])
    else:
        chunks = _hub_rows(_load_hub(config), "train", config)
    return chunks if config.max_train_bytes is None else _cut_at_line(chunks, config.max_train_bytes)


# --- sources --------------------------------------------------------------------------------------------------------


def _file_chunks(path: str) -> Iterator[bytes]:
    with open_compressed(path, ".txt") as stream:
        while chunk := stream.read(2**16):
            yield chunk


def _read_files(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    splits = [split for split in config.files if not (config.streaming and split == "train")]
    return _split_in_order({split: b"".join(_file_chunks(config.files[split])) for split in splits}, config)


def _load_hub(config: LanguageModelingDataConfig) -> Any:
    loaded = datasets.load_dataset(config.hub_dataset, config.hub_subset, streaming=config.streaming)
    for needed in ("train", "validation") if config.streaming else ("train",):
        if needed not in loaded:
            raise ValueError(
                f"hub_dataset {config.hub_dataset!r} has the splits {list(loaded)}; {needed!r} is needed"
                + (" for streaming" if config.streaming else "")
            )
    return loaded


def _hub_rows(loaded: Any, split: str, config: LanguageModelingDataConfig) -> Iterator[bytes]:
    columns = loaded[split].column_names  # None if a stream does not know them
    if columns is not None and config.text_column not in columns:
        raise ValueError(f"text_column={config.text_column!r}: {config.hub_dataset!r} has the columns {columns}")
    for index, row in enumerate(loaded[split][config.text_column]):
        if not isinstance(row, str):
            raise ValueError(
                f"text_column={config.text_column!r}: row {index} of {split} is {row!r}. Choose a column of strings."
            )
        yield _with_line_end(row).encode()


def _read_hub(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    loaded = _load_hub(config)
    splits = [split for split in SPLITS if split in loaded and not (config.streaming and split == "train")]
    return _split_in_order({split: b"".join(_hub_rows(loaded, split, config)) for split in splits}, config)


def _read_embedded(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    unique: dict[str, None] = {}  # identical files could end up in two splits
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            with tokenize.open(path) as stream:  # follows Python's rule for the encoding of a source file
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


def _with_line_end(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


# --- cuts -----------------------------------------------------------------------------------------------------------


def _split_in_order(texts: dict[str, bytes], config: LanguageModelingDataConfig) -> dict[str, bytes]:
    """Cut the missing validation and test texts from the end of the training text."""
    if "validation" in texts:
        return texts
    text = texts["train"]
    test_fraction = 0.0 if "test" in texts else config.test_fraction
    ends = (1 - config.validation_fraction - test_fraction, 1 - test_fraction)
    first, second = (_character_boundary(text, round(len(text) * end)) for end in ends)
    parts = {"train": text[:first], "validation": text[first:second]}
    return {**texts, **parts, "test": text[second:]} if test_fraction else {**texts, **parts}


def _character_boundary(text: bytes | bytearray, position: int) -> int:
    """The last boundary of a UTF-8 character at or before a position; the position itself in other bytes."""
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
    """`text[: line_boundary(text, 0, limit)]` for a text that comes in chunks."""
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
