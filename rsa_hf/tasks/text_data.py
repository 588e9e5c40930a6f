"""The texts of language modelling: read, split, and cut into blocks or segments of tokens.

*Blocks* are independent of each other. Their `labels` are their input ids, because transformers' models shift them;
the first token of a text or block cannot be predicted, so its label is -100.

*Segments* are consecutive, for models that carry a memory from one to the next. They have `shift_labels`, the tokens
that follow each input: with `labels`, which are shifted, one token per segment would not be predicted.

Data sets of both cut their items from `token_ids`, integers [N], on access. `block_size` is the length of an item, at
least 2; items hold int64 [block_size].
"""

from __future__ import annotations

import math
import random
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rsa_hf.tasks.compressed import open_compressed

__all__ = [
    "IGNORED_LABEL",
    "SPLITS",
    "EvaluationBlocks",
    "EvaluationSegments",
    "LanguageModelingDataConfig",
    "StreamedBlocks",
    "TrainingBlocks",
    "TrainingTracks",
    "line_boundary",
    "read_texts",
    "stream_training_text",
]

SPLITS = ("train", "validation", "test")
IGNORED_LABEL = -100  # ignored by the losses of transformers

Item = dict[str, torch.Tensor]


@dataclass
class LanguageModelingDataConfig:
    """The texts of language modelling, and how they are cut into blocks.

    Args:
        source: "embedded" (source files of Python's standard library, no download; comparable only under one Python
            version), "hub" or "files".
        files: for "files": paths of "train" (required), "validation" and "test"; .txt, .gz or .xz, read as bytes.
        hub_dataset: for "hub": the data set, for instance "Salesforce/wikitext".
        hub_subset: for "hub": its configuration, for instance "wikitext-103-raw-v1".
        text_column: for "hub": the column of text. A line end is added to each row that has none.
        block_size: number of tokens in a block, at least 2.
        carry_memory: train and evaluate on consecutive segments and carry the model's memory from one to the next; for
            models with a memory (Transformer-XL, recurrent networks); False: independent blocks in random order.
        eval_block_size: block or segment size in evaluation; None: `block_size`.
        eval_memory: entries of the model's config that differ in evaluation, such as `mem_len` of Transformer-XL; with
            `carry_memory`.
        stride: tokens from one evaluation block's start to the next, below the block size; repeated tokens are context
            and scored once; None: block size - 1, the fewest blocks. Not with `carry_memory`.
        max_train_bytes: keep at most this many bytes of the training text, cut after a line end if possible; None:
            all.
        max_eval_bytes: the same for the validation and test texts, each.
        validation_fraction: share of the training text that is used for validation if the source has no such text.
        test_fraction: share used for testing if the source has neither a validation nor a test text; 0 for none. Cut
            from the end of the text in order; for "embedded", shares of the shuffled files.
        streaming: read the training text piece by piece instead of keeping it in memory, and train on its blocks in
            order; for "hub" and "files" with a validation text.
        count_line_ends_as_words: count each line end as a word, as published WikiText perplexities do.
        seed: seed of the shuffling of the files of "embedded".

    Raises:
        ValueError: a value is not allowed, or belongs to another source.
    """

    source: Literal["embedded", "hub", "files"] = "embedded"
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
        has_validation = self.source == "hub" or "validation" in self.files
        rules = {
            f"files={self.files}: needed with source='files', and read only there.": (
                bool(self.files) == (self.source == "files")
            ),
            f"files={self.files}: 'train' is needed; 'validation' and 'test' are optional.": (
                not self.files or {"train"} <= set(self.files) <= set(SPLITS)
            ),
            f"hub_dataset={self.hub_dataset!r}: needed with source='hub', and read only there.": (
                bool(self.hub_dataset) == (self.source == "hub")
            ),
            "streaming=True: a stream has no end to cut a validation text from, and no known length to cut into the "
            "tracks of carry_memory. Use source 'hub', or 'files' with 'validation', without carry_memory.": (
                not self.streaming or (has_validation and not self.carry_memory)
            ),
            f"eval_memory={self.eval_memory}: has no effect without carry_memory. Set it to true.": (
                self.carry_memory or not self.eval_memory
            ),
            f"stride={self.stride}: not with carry_memory, whose segments have their context in memory.": (
                self.stride is None or not self.carry_memory
            ),
            f"block_size={self.block_size}, eval_block_size={self.eval_block_size}: 2 or more tokens, as the first "
            "one is never predicted.": min(self.block_size, self.evaluation_block_size) >= 2,
            f"stride={self.stride}: from 1 to {self.evaluation_block_size - 1}, for a token of context.": (
                self.stride is None or 1 <= self.stride < self.evaluation_block_size
            ),
            f"validation_fraction={self.validation_fraction} and test_fraction={self.test_fraction}: the first must "
            "be above 0, the second at least 0, and their sum below 1.": (
                0 < self.validation_fraction < 1 - self.test_fraction <= 1
            ),
        }
        for message, holds in rules.items():
            if not holds:
                raise ValueError(message)

    @property
    def evaluation_block_size(self) -> int:
        """`eval_block_size`, or `block_size` if it is None."""
        return self.block_size if self.eval_block_size is None else self.eval_block_size


# --- texts ----------------------------------------------------------------------------------------------------------


def read_texts(config: LanguageModelingDataConfig) -> dict[str, bytes]:
    """Read the texts of a configuration and cut them to its limits.

    Returns:
        The bytes of each split: train (unless it is streamed), validation and, if there is one, test.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file or data set cannot be used, or a split is empty.
    """
    if config.source == "embedded":
        texts = _read_embedded(config)
    else:
        chunks = _chunks(config)
        if config.streaming:
            del chunks["train"]
        texts = _split_in_order({split: b"".join(parts) for split, parts in chunks.items()}, config)
    for split, text in texts.items():
        option = "max_train_bytes" if split == "train" else "max_eval_bytes"
        limit = getattr(config, option)
        texts[split] = text if limit is None else text[: line_boundary(text, 0, limit)]
        if not texts[split]:
            raise ValueError(
                f"nothing is left of the {split} text ({len(text)} bytes, {option}={limit}). Raise {option}, or give "
                "more text or a larger fraction."
            )
    return texts


def stream_training_text(config: LanguageModelingDataConfig) -> Iterator[bytes]:
    """The training text of a configuration with `streaming`, in pieces."""
    chunks = _chunks(config)["train"]
    return chunks if config.max_train_bytes is None else _cut_at_line(chunks, config.max_train_bytes)


def _chunks(config: LanguageModelingDataConfig) -> dict[str, Iterator[bytes]]:
    """The texts of files or of a data set of the Hub, each in pieces."""
    if config.source == "files":
        return {split: _file_chunks(path) for split, path in config.files.items()}
    loaded = datasets.load_dataset(config.hub_dataset, config.hub_subset, streaming=config.streaming)
    needed = {"train", "validation"} if config.streaming else {"train"}
    if not needed <= set(loaded):
        raise ValueError(f"hub_dataset={config.hub_dataset!r}: has the splits {list(loaded)}; needed: {needed}.")
    column = config.text_column
    return {
        split: (_with_line_end(row[column]).encode() for row in loaded[split].select_columns(column))
        for split in SPLITS
        if split in loaded
    }


def _file_chunks(path: str) -> Iterator[bytes]:
    with open_compressed(path, ".txt") as stream:
        while chunk := stream.read(2**16):
            yield chunk


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
    random.Random(config.seed).shuffle(sources)
    num_validation = max(1, round(len(sources) * config.validation_fraction))
    num_test = max(1, round(len(sources) * config.test_fraction)) if config.test_fraction else 0
    num_train = len(sources) - num_validation - num_test
    parts = {"train": sources[:num_train], "validation": sources[num_train : num_train + num_validation]}
    if num_test:
        parts["test"] = sources[num_train + num_validation :]
    return {split: "".join(part).encode() for split, part in parts.items()}


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


# --- blocks and segments --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TrainingBlocks(Dataset[Item]):
    """Consecutive blocks, with `input_ids` and `labels`. The incomplete block at the end is dropped.

    Raises:
        ValueError: there are fewer tokens than one block.
    """

    token_ids: torch.Tensor
    block_size: int

    def __post_init__(self) -> None:
        _require_a_block(len(self.token_ids), self.block_size)

    def __len__(self) -> int:
        return len(self.token_ids) // self.block_size

    def __getitem__(self, index: int) -> Item:
        begin = range(len(self))[index] * self.block_size
        return _block(self.token_ids[begin : begin + self.block_size], 1)


@dataclass(eq=False)
class StreamedBlocks(IterableDataset[Item]):
    """The items of `TrainingBlocks`, in order, from a text that is read again in each epoch.

    Args:
        pieces: called for each epoch. Returns the token ids of the text in pieces of any size.
        block_size: number of tokens in a block.

    Raises:
        ValueError: while iterating: there are fewer tokens than one block, or a `DataLoader` has several workers, each
            of which would read the whole text.
    """

    pieces: Callable[[], Iterable[torch.Tensor]]
    block_size: int

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(f"num_workers={worker.num_workers}: a text is streamed by one process. Choose 0 or 1.")
        size, num_tokens = self.block_size, 0
        rest: list[torch.Tensor] = []
        for piece in self.pieces():
            num_tokens += len(piece)
            token_ids = torch.cat([*rest, piece])
            whole = len(token_ids) // size * size
            for begin in range(0, whole, size):
                yield _block(token_ids[begin : begin + size], 1)
            rest = [token_ids[whole:]]
        _require_a_block(num_tokens, size)


@dataclass(eq=False)
class TrainingTracks(Dataset[Item]):
    """A text cut into R tracks of equal length, which are read in parallel, segment by segment.

    Item s · R + r is segment s of track r, with `input_ids` and `shift_labels`. R consecutive items are therefore a
    batch in which every row continues the same row of the previous batch. The tracks follow each other in the text;
    its tail that does not fill a segment of every track is dropped.

    Args:
        token_ids: the text.
        block_size: number of tokens in a segment.
        num_tracks: R, the rows of a training step: over all processes and micro-batches.

    Raises:
        ValueError: there are too few tokens for a segment of each track.
    """

    token_ids: torch.Tensor
    block_size: int
    num_tracks: int

    def __post_init__(self) -> None:
        needed = self.num_tracks * self.block_size + 1  # the last token is only a target
        self.num_segments = (len(self.token_ids) - 1) // (needed - 1)
        if self.num_segments < 1:
            raise ValueError(
                f"the training text has {len(self.token_ids)} tokens; {self.num_tracks} tracks with a segment of "
                f"{self.block_size} take {needed}. Choose a smaller block_size or batch_size, or more text."
            )

    def __len__(self) -> int:
        return self.num_segments * self.num_tracks

    def __getitem__(self, index: int) -> Item:
        segment, track = divmod(range(len(self))[index], self.num_tracks)
        return _segment(self.token_ids, (track * self.num_segments + segment) * self.block_size, self.block_size)


@dataclass(eq=False)
class EvaluationBlocks(Dataset[Item]):
    """Blocks in which every token of a text but the first is scored exactly once.

    Block i starts at token i · stride and holds `input_ids` and `labels`; the last one may be shorter. It repeats the
    last block_size - stride tokens of block i - 1 as context, at least one; the labels of the context are -100.

    Args:
        token_ids: the text, N ≥ 2.
        block_size: number of tokens in a block.
        num_bytes: number of bytes of the scored text, which begins after the first token.
        num_words: number of words of the scored text.
        stride: from 1 to block_size - 1; None: block_size - 1.
    """

    token_ids: torch.Tensor
    block_size: int
    num_bytes: int
    num_words: int
    stride: int | None = None

    def __post_init__(self) -> None:
        self.step = self.block_size - 1 if self.stride is None else self.stride

    def __len__(self) -> int:
        return 1 + math.ceil(max(0, len(self.token_ids) - self.block_size) / self.step)

    def __getitem__(self, index: int) -> Item:
        begin = range(len(self))[index] * self.step
        context = 1 if begin == 0 else self.block_size - self.step
        return _block(self.token_ids[begin : begin + self.block_size], context)


@dataclass(eq=False)
class EvaluationSegments(Dataset[Item]):
    """Consecutive segments in which every token of a text but the first is scored exactly once.

    Segment i starts at token i · block_size and holds `input_ids` and `shift_labels`; the last one may be shorter. The
    arguments are those of `EvaluationBlocks`.
    """

    token_ids: torch.Tensor
    block_size: int
    num_bytes: int
    num_words: int

    def __len__(self) -> int:
        return math.ceil((len(self.token_ids) - 1) / self.block_size)

    def __getitem__(self, index: int) -> Item:
        return _segment(self.token_ids, range(len(self))[index] * self.block_size, self.block_size)


def _require_a_block(num_tokens: int, block_size: int) -> None:
    if num_tokens < block_size:
        raise ValueError(
            f"block_size={block_size}: more than the {num_tokens} tokens of the training text. Choose a smaller one, "
            "or more text."
        )


def _block(token_ids: torch.Tensor, context: int) -> Item:
    input_ids = token_ids.long()
    labels = input_ids.clone()
    labels[:context] = IGNORED_LABEL
    return {"input_ids": input_ids, "labels": labels}


def _segment(token_ids: torch.Tensor, begin: int, length: int) -> Item:
    tokens = token_ids[begin : begin + length + 1].long()
    return {"input_ids": tokens[:-1].clone(), "shift_labels": tokens[1:].clone()}  # two views would share memory
