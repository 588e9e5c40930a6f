"""A text as consecutive segments: what a model is trained and scored on that carries a memory from one to the next.

The token behind a segment is the first of the next one. It is no input yet but a target, so `shift_labels`, the tokens
that follow each input, take the place of `labels`, which transformers' models shift themselves: they would lose one
token a segment.
"""

from __future__ import annotations

import math

import torch
from torch.utils.data import Dataset

from rsa_hf.tasks.texts import check_block_shape
from rsa_hf.utils.checks import check_integer

__all__ = ["EvaluationSegments", "TrainingTracks"]


class TrainingTracks(Dataset[dict[str, torch.Tensor]]):
    """A text cut into R tracks of equal length, which are read side by side, segment by segment.

    Item s · R + r is segment s of track r; so R items in a row are a batch whose every row continues the same row of
    the batch before. An item holds `input_ids` and `shift_labels`, the tokens that follow them, int64 [block_size].
    Each track begins where the one before ends, and the tail of the text that does not fill a segment of every track
    is dropped.

    Args:
        token_ids: one-dimensional integer tensor, kept as it is; items are cut from it when asked for.
        block_size: tokens in a segment.
        num_tracks: R, the rows of a training step, on all processes and in all micro-batches.

    Raises:
        ValueError: a block size below 2, no track, or too few tokens for a segment of each.
    """

    def __init__(self, token_ids: torch.Tensor, block_size: int, num_tracks: int) -> None:
        check_block_shape(block_size, None)
        check_integer("num_tracks", num_tracks, 1)
        # The last token is a target alone.
        self.num_segments = (len(token_ids) - 1) // (num_tracks * block_size)
        if self.num_segments < 1:
            raise ValueError(
                f"the training text has {len(token_ids)} tokens, too few for a segment of {block_size} in each of "
                f"{num_tracks} tracks and one token more ({num_tracks * block_size + 1}); choose a smaller block_size "
                "or batch_size, or more text"
            )
        self.token_ids = token_ids
        self.block_size = block_size
        self.num_tracks = num_tracks

    def __len__(self) -> int:
        return self.num_segments * self.num_tracks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        segment, track = divmod(range(len(self))[index], self.num_tracks)
        return _segment(self.token_ids, (track * self.num_segments + segment) * self.block_size, self.block_size)


class EvaluationSegments(Dataset[dict[str, torch.Tensor]]):
    """Consecutive segments of a text, in which every token but the first is scored exactly once.

    Segment i reads `block_size` tokens from i · block_size on, the last one perhaps fewer. An item holds `input_ids`
    and `shift_labels`, the tokens that follow them, int64 [length].

    Args:
        token_ids: one-dimensional integer tensor of at least two tokens, kept as it is.
        block_size: tokens in a segment, at least 2.
        num_bytes: bytes of the scored text, the text after the first token.
        num_words: words of the scored text.

    Raises:
        ValueError: a block size out of range, or fewer than two tokens.
    """

    def __init__(self, token_ids: torch.Tensor, block_size: int, num_bytes: int, num_words: int) -> None:
        check_block_shape(block_size, None)
        if len(token_ids) < 2:
            raise ValueError(f"the text has {len(token_ids)} token(s); at least 2 are needed to predict one: add text")
        self.token_ids = token_ids
        self.block_size = block_size
        self.num_bytes = num_bytes
        self.num_words = num_words

    def __len__(self) -> int:
        return math.ceil((len(self.token_ids) - 1) / self.block_size)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _segment(self.token_ids, range(len(self))[index] * self.block_size, self.block_size)


def _segment(token_ids: torch.Tensor, begin: int, length: int) -> dict[str, torch.Tensor]:
    tokens = token_ids[begin : begin + length + 1].long()
    # Copies: two views of one storage would change with each other.
    return {"input_ids": tokens[:-1].clone(), "shift_labels": tokens[1:].clone()}
