"""Data sets of blocks and segments of a tokenized text, for training and for evaluation.

*Blocks* are independent of each other. Their `labels` are their input ids, because transformers' models shift them;
the first token of a text or block cannot be predicted, so its label is -100.

*Segments* are consecutive, for models that carry a memory from one to the next. The token behind a segment is the
first
input of the next one and a target of this one, so they have `shift_labels`, the tokens that follow each input: with
`labels`, which are shifted, one token per segment would not be predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

__all__ = [
    "IGNORED_LABEL",
    "EvaluationBlocks",
    "EvaluationSegments",
    "StreamedBlocks",
    "TrainingBlocks",
    "TrainingTracks",
    "check_block_shape",
]

IGNORED_LABEL = -100  # ignored by the losses of transformers


def check_block_shape(block_size: int, stride: int | None = None) -> None:
    """Raise a ValueError unless blocks of this size and stride cover a text."""
    if block_size < 2:
        raise ValueError(f"a block size of {block_size}: choose 2 or more tokens, as the first one is never predicted")
    if stride is not None and not 1 <= stride < block_size:
        raise ValueError(f"stride={stride}: choose from 1 to {block_size - 1}, as a block needs a token of context")


# --- training -------------------------------------------------------------------------------------------------------


class TrainingBlocks(Dataset[dict[str, torch.Tensor]]):
    """Consecutive blocks of exactly `block_size` tokens. The incomplete block at the end is dropped.

    An item holds `input_ids` and `labels`, int64 [block_size].

    Args:
        token_ids: Integers [N]. Items are cut from it on access.
        block_size: Number of tokens in a block, at least 2.

    Raises:
        ValueError: The block size is below 2, or there are fewer tokens than one block.
    """

    def __init__(self, token_ids: torch.Tensor, block_size: int) -> None:
        check_block_shape(block_size)
        _require_a_block(len(token_ids), block_size)
        self.token_ids = token_ids
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.token_ids) // self.block_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = range(len(self))[index] * self.block_size
        return _block(self.token_ids[begin : begin + self.block_size], 1)


class StreamedBlocks(IterableDataset[dict[str, torch.Tensor]]):
    """The items of `TrainingBlocks`, in order, from a text that is read again in each epoch.

    Args:
        pieces: Called for each epoch. Returns the token ids of the text in pieces of any size.
        block_size: Number of tokens in a block, at least 2.

    Raises:
        ValueError: The block size is below 2. While iterating: there are fewer tokens than one block, or a
            `DataLoader` has several workers, each of which would read the whole text.
    """

    def __init__(self, pieces: Callable[[], Iterable[torch.Tensor]], block_size: int) -> None:
        check_block_shape(block_size)
        self.pieces = pieces
        self.block_size = block_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
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


class TrainingTracks(Dataset[dict[str, torch.Tensor]]):
    """A text cut into R tracks of equal length, which are read in parallel, segment by segment.

    Item s · R + r is segment s of track r. R consecutive items are therefore a batch in which every row continues the
    same row of the previous batch. An item holds `input_ids` and `shift_labels`, int64 [block_size]. The tracks follow
    each other in the text; its tail that does not fill a segment of every track is dropped.

    Args:
        token_ids: Integers [N]. Items are cut from it on access.
        block_size: Number of tokens in a segment, at least 2.
        num_tracks: R, the rows of a training step: over all processes and micro-batches.

    Raises:
        ValueError: The block size is below 2, or there are too few tokens for a segment of each track.
    """

    def __init__(self, token_ids: torch.Tensor, block_size: int, num_tracks: int) -> None:
        check_block_shape(block_size)
        self.num_segments = (len(token_ids) - 1) // (num_tracks * block_size)  # the last token is only a target
        if self.num_segments < 1:
            raise ValueError(
                f"the training text has {len(token_ids)} tokens; {num_tracks} tracks with a segment of {block_size} "
                f"take {num_tracks * block_size + 1}. Choose a smaller block_size or batch_size, or more text."
            )
        self.token_ids = token_ids
        self.block_size = block_size
        self.num_tracks = num_tracks

    def __len__(self) -> int:
        return self.num_segments * self.num_tracks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        segment, track = divmod(range(len(self))[index], self.num_tracks)
        return _segment(self.token_ids, (track * self.num_segments + segment) * self.block_size, self.block_size)


# --- evaluation -----------------------------------------------------------------------------------------------------


class _EvaluationText(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, token_ids: torch.Tensor, block_size: int, num_bytes: int, num_words: int) -> None:
        check_block_shape(block_size)
        if len(token_ids) < 2:
            raise ValueError(f"the text has {len(token_ids)} token(s); at least 2 are needed to predict one")
        self.token_ids = token_ids
        self.block_size = block_size
        self.num_bytes = num_bytes
        self.num_words = num_words


class EvaluationBlocks(_EvaluationText):
    """Blocks in which every token of a text but the first is scored exactly once.

    Block i starts at token i · stride and has `block_size` tokens; the last one may have fewer. It repeats the last
    block_size - stride tokens of block i - 1 as context, at least one. An item holds `input_ids` and `labels`, int64
    [length]; the labels of the context are -100.

    Args:
        token_ids: Integers [N], N ≥ 2. Items are cut from it on access.
        block_size: Number of tokens in a block, at least 2.
        num_bytes: Number of bytes of the scored text, which begins after the first token.
        num_words: Number of words of the scored text.
        stride: From 1 to block_size - 1. None: block_size - 1.

    Raises:
        ValueError: The block size or stride is out of range, or there are fewer than two tokens.
    """

    def __init__(
        self, token_ids: torch.Tensor, block_size: int, num_bytes: int, num_words: int, stride: int | None = None
    ) -> None:
        super().__init__(token_ids, block_size, num_bytes, num_words)
        check_block_shape(block_size, stride)
        self.stride = block_size - 1 if stride is None else stride

    def __len__(self) -> int:
        return 1 + math.ceil(max(0, len(self.token_ids) - self.block_size) / self.stride)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = range(len(self))[index] * self.stride
        context = 1 if begin == 0 else self.block_size - self.stride
        return _block(self.token_ids[begin : begin + self.block_size], context)


class EvaluationSegments(_EvaluationText):
    """Consecutive segments in which every token of a text but the first is scored exactly once.

    Segment i reads `block_size` tokens from token i · block_size on; the last one may be shorter. An item holds
    `input_ids` and `shift_labels`, int64 [length].

    Args:
        token_ids: Integers [N], N ≥ 2. Items are cut from it on access.
        block_size: Number of tokens in a segment, at least 2.
        num_bytes: Number of bytes of the scored text, which begins after the first token.
        num_words: Number of words of the scored text.

    Raises:
        ValueError: The block size is below 2, or there are fewer than two tokens.
    """

    def __len__(self) -> int:
        return math.ceil((len(self.token_ids) - 1) / self.block_size)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _segment(self.token_ids, range(len(self))[index] * self.block_size, self.block_size)


def _require_a_block(num_tokens: int, block_size: int) -> None:
    if num_tokens < block_size:
        raise ValueError(
            f"the training text has {num_tokens} tokens, fewer than block_size {block_size}; "
            "choose a smaller block_size or more text"
        )


def _block(token_ids: torch.Tensor, context: int) -> dict[str, torch.Tensor]:
    input_ids = token_ids.long()
    labels = input_ids.clone()
    labels[:context] = IGNORED_LABEL
    return {"input_ids": input_ids, "labels": labels}


def _segment(token_ids: torch.Tensor, begin: int, length: int) -> dict[str, torch.Tensor]:
    tokens = token_ids[begin : begin + length + 1].long()
    return {"input_ids": tokens[:-1].clone(), "shift_labels": tokens[1:].clone()}  # two views would share memory
