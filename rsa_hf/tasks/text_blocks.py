"""Blocks and segments of tokens, as data sets that cut them from `token_ids`, integers [N], on access.

*Blocks* are independent of each other. Their `labels` are their input ids, because transformers' models shift them;
the first token of a text or block cannot be predicted, so its label is -100.

*Segments* are consecutive, for models that carry a memory from one to the next. They have `shift_labels`, the tokens
that follow each input: with `labels`, which are shifted, one token per segment would not be predicted.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

IGNORED_LABEL = -100  # ignored by the losses of transformers

Item = dict[str, torch.Tensor]


@dataclass(eq=False)
class TrainingBlocks(Dataset[Item]):
    """Consecutive blocks. An incomplete block at the end is dropped; if it is the only one, this is a ValueError."""

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

    `pieces`, called for each epoch, returns the token ids of the text in pieces of any size. A `DataLoader` may have
    only one worker, since each would read the whole text.
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
    """A text cut into R = `num_tracks` tracks of equal length, which are read in parallel, segment by segment.

    Item s · R + r is segment s of track r. R consecutive items, the rows of a training step over all processes and
    micro-batches, therefore continue the same rows of the step before. The tracks follow each other in the text; a
    tail that does not fill a segment of every track is dropped.
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
                f"{self.block_size} take {needed}. Lower block_size or the batch size, or give more text."
            )

    def __len__(self) -> int:
        return self.num_segments * self.num_tracks

    def __getitem__(self, index: int) -> Item:
        segment, track = divmod(range(len(self))[index], self.num_tracks)
        return _segment(self.token_ids, (track * self.num_segments + segment) * self.block_size, self.block_size)


@dataclass(eq=False)
class EvaluationBlocks(Dataset[Item]):
    """Blocks in which every token of a text but the first is scored exactly once.

    Block i starts at token i · stride; the last one may be shorter. It repeats the last block_size - stride tokens of
    block i - 1 as context, at least one; the labels of the context are -100.
    """

    token_ids: torch.Tensor
    block_size: int
    num_bytes: int  # of the scored text, which begins after the first token
    num_words: int
    stride: int | None = None  # from 1 to block_size - 1; None: block_size - 1

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
    """Consecutive segments in which every token of a text but the first is scored exactly once."""

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
        raise ValueError(f"block_size={block_size}: more than the {num_tokens} tokens of the training text. Lower it.")


def _block(token_ids: torch.Tensor, context: int) -> Item:
    input_ids = token_ids.long()
    labels = input_ids.clone()
    labels[:context] = IGNORED_LABEL
    return {"input_ids": input_ids, "labels": labels}


def _segment(token_ids: torch.Tensor, begin: int, length: int) -> Item:
    tokens = token_ids[begin : begin + length + 1].long()
    return {"input_ids": tokens[:-1].clone(), "shift_labels": tokens[1:].clone()}  # two views would share memory
