"""Causal language modelling: texts, blocks of tokens, and the score of a model on a whole text.

Let a text have tokens t_0 … t_{N−1}. Every token but t_0 is scored exactly once, and every figure comes from
the summed negative log-likelihood of those N − 1 tokens: *token* perplexity divides it by the tokens, *word*
perplexity by the words and bits per byte by the bytes of the text after t_0. Only the last two can be
compared between tokenizers.

Words are what ASCII whitespace separates, as `wc -w` counts. Published WikiText perplexities count the <eos>
at every line end as well; `count_line_ends_as_words` follows them (WikiText-2 test: 241,211 words without,
245,569 with).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rsa_hf.tasks.segments import EvaluationSegments, TrainingTracks
from rsa_hf.tasks.text8 import text8_tokenizer
from rsa_hf.tasks.texts import (
    LanguageModelingDataConfig,
    check_block_shape,
    line_boundary,
    read_texts,
    stream_training_text,
)

__all__ = [
    "IGNORED_LABEL",
    "EvaluationBlocks",
    "LanguageModelingDataConfig",
    "PreparedText",
    "StreamedBlocks",
    "TrainingBlocks",
    "load_language_modeling_tokenizer",
    "prepare_language_modeling",
]

IGNORED_LABEL = -100  # what transformers' losses leave out
BYTE_VOCABULARY_SIZE = 256
# A tokenizer's bookkeeping takes about a hundred bytes a token, so longer texts are tokenized in pieces.
TOKENIZED_PIECE_BYTES = 4 * 2**20


def load_language_modeling_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a name or folder, or None for "bytes".

    Args:
        name: "bytes" for raw bytes (vocabulary of 256, no tokenizer), "text8" for its 27 symbols, else what
            `AutoTokenizer` accepts.

    Returns:
        What `prepare_language_modeling` takes as its tokenizer.
    """
    if name == "text8":
        return text8_tokenizer()
    return None if name == "bytes" else AutoTokenizer.from_pretrained(name)


def _encode(split: str, chunks: Iterable[bytes], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[torch.Tensor]:
    """The token ids of a text, piece by piece; the chunks that it comes in do not matter."""
    lines = 0
    for piece in _pieces(chunks):
        if tokenizer is None:
            yield torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            continue
        try:
            text = piece.decode()
        except UnicodeDecodeError as error:
            line = lines + piece.count(b"\n", 0, error.start) + 1
            raise ValueError(
                f"the {split} text is not UTF-8 at line {line} (byte {piece[error.start]:#04x}); "
                "convert it, or use the tokenizer 'bytes', which takes any bytes"
            ) from error
        lines += piece.count(b"\n")
        # No special tokens: every token that is scored then stands for a part of the text.
        try:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:
            # Of a character that it has no token for, the tokenizers library raises an Exception, no more exact.
            if "[UNK]" not in str(error):
                raise
            raise ValueError(
                f"the {split} text has characters that the tokenizer has no token for ({error}); clean it "
                "(scripts/make_text8.py for text8), or choose another tokenizer"
            ) from error
        yield torch.tensor(ids, dtype=torch.int32)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces to tokenize at once, cut after a line end where there is one."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start > TOKENIZED_PIECE_BYTES:
            end = line_boundary(held, start, TOKENIZED_PIECE_BYTES)
            yield bytes(held[start:end])
            start = end
        del held[:start]
    if held:
        yield bytes(held)


class TrainingBlocks(Dataset[dict[str, torch.Tensor]]):
    """Consecutive blocks of exactly `block_size` tokens; the short tail of the text is dropped.

    An item holds `input_ids` and `labels`, int64 [block_size]. Labels are the input ids, as transformers'
    models shift them; the first is never predicted and is −100, so that the labels other than −100 are
    just the tokens that enter the loss.

    Args:
        token_ids: One-dimensional integer tensor, kept as it is; items are cut from it when asked for.
        block_size: Tokens in a block, at least 2.

    Raises:
        ValueError: A block size below 2, or fewer tokens than one block.
    """

    def __init__(self, token_ids: torch.Tensor, block_size: int) -> None:
        check_block_shape(block_size, None)
        _require_a_block(len(token_ids), block_size)
        self.token_ids = token_ids
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.token_ids) // self.block_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = range(len(self))[index] * self.block_size
        return _block(self.token_ids[begin : begin + self.block_size], 1)


class StreamedBlocks(IterableDataset[dict[str, torch.Tensor]]):
    """The items of `TrainingBlocks`, in order, of a text that is read anew each time they are asked for.

    Args:
        chunks: Called for each pass; gives the bytes of the text in chunks of any size.
        tokenizer: Any tokenizer of transformers, or None for raw bytes.
        block_size: Tokens in a block, at least 2.

    Raises:
        ValueError: A block size below 2. While iterating: a text that is not UTF-8, fewer tokens than one block, or
            several workers of a `DataLoader`, each of which would read the whole text.
    """

    def __init__(
        self,
        chunks: Callable[[], Iterable[bytes]],
        tokenizer: PreTrainedTokenizerBase | None,
        block_size: int,
    ) -> None:
        check_block_shape(block_size, None)
        self.chunks = chunks
        self.tokenizer = tokenizer
        self.block_size = block_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(f"num_workers is {worker.num_workers}; a text is streamed by one: choose 0 or 1")
        size, num_tokens = self.block_size, 0
        rest: list[torch.Tensor] = []
        for piece in _encode("training", self.chunks(), self.tokenizer):
            num_tokens += len(piece)
            token_ids = torch.cat([*rest, piece])
            whole = len(token_ids) // size * size
            for begin in range(0, whole, size):
                yield _block(token_ids[begin : begin + size], 1)
            rest = [token_ids[whole:]]
        _require_a_block(num_tokens, size)


def _require_a_block(num_tokens: int, block_size: int) -> None:
    if num_tokens < block_size:
        raise ValueError(
            f"the training text has {num_tokens} tokens, fewer than block_size {block_size}; "
            "choose a smaller block_size or more text"
        )


class EvaluationBlocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks in which every token of a text but the first is scored exactly once.

    Block i covers `block_size` tokens from i · stride on, the last block perhaps fewer. It repeats the last
    block_size − stride tokens of block i − 1 as context, at least one: without it a block's first token could
    not be predicted. An item holds `input_ids` and `labels`, int64 [length]; labels are the input ids,
    because transformers' models shift them, and −100 on the context. As the last block may be short, batches
    are best left to `evaluate_language_model`.

    Args:
        token_ids: One-dimensional integer tensor of at least two tokens, kept as it is.
        block_size: Tokens in a block, at least 2.
        num_bytes: Bytes of the scored text, the text after the first token.
        num_words: Words of the scored text.
        stride: From 1 to block_size − 1; None for block_size − 1.

    Raises:
        ValueError: A block size or stride out of range, or fewer than two tokens.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        block_size: int,
        num_bytes: int,
        num_words: int,
        stride: int | None = None,
    ) -> None:
        check_block_shape(block_size, stride)
        if len(token_ids) < 2:
            raise ValueError(f"the text has {len(token_ids)} token(s); at least 2 are needed to predict one: add text")
        self.token_ids = token_ids
        self.block_size = block_size
        self.stride = block_size - 1 if stride is None else stride
        self.num_bytes = num_bytes
        self.num_words = num_words

    def __len__(self) -> int:
        return 1 + math.ceil(max(0, len(self.token_ids) - self.block_size) / self.stride)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = range(len(self))[index] * self.stride
        context = 1 if begin == 0 else self.block_size - self.stride
        return _block(self.token_ids[begin : begin + self.block_size], context)


def _block(token_ids: torch.Tensor, context: int) -> dict[str, torch.Tensor]:
    input_ids = token_ids.long()
    labels = input_ids.clone()
    labels[:context] = IGNORED_LABEL
    return {"input_ids": input_ids, "labels": labels}


@dataclass
class PreparedText:
    """What training and evaluation need of a text.

    Attributes:
        train: Blocks for training; `StreamedBlocks` where the configuration asks for streaming, and `TrainingTracks`
            where it asks to carry memory.
        validation: Blocks for evaluation, with the byte and word counts of their text; segments where the
            configuration asks to carry memory.
        test: The same for the test text; None where there is none.
        vocab_size: The number of token ids a model must know.
    """

    train: TrainingBlocks | StreamedBlocks | TrainingTracks
    validation: EvaluationBlocks | EvaluationSegments
    test: EvaluationBlocks | EvaluationSegments | None
    vocab_size: int


def prepare_language_modeling(
    config: LanguageModelingDataConfig, tokenizer: PreTrainedTokenizerBase | None, num_tracks: int = 1
) -> PreparedText:
    """Read, cut, tokenize and count the texts of a configuration.

    No special tokens are added. Texts above 4 MiB are tokenized in pieces that end with a line. Bytes and
    words are counted after the first token; where decoding that token does not give back the start of the
    text (a tokenizer that lower-cases, say), in the whole text.

    Args:
        config: Where the text comes from and how it is cut.
        tokenizer: Any tokenizer of transformers, or None for raw bytes.
        num_tracks: Rows of a training step, on all processes and in all micro-batches; where memory is carried the
            training text is cut into so many tracks.

    Returns:
        The blocks of each split.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file or data set cannot be used, or a split is too short.
    """
    texts = read_texts(config)
    token_ids = {split: torch.cat([*_encode(split, [text], tokenizer)]) for split, text in texts.items()}

    def evaluation(split: str) -> EvaluationBlocks | EvaluationSegments:
        ids = token_ids[split]
        first = texts[split][:1] if tokenizer is None else _first_token_text(ids, tokenizer)
        scored = texts[split].removeprefix(first)
        num_words = len(scored.split()) + (scored.count(b"\n") if config.count_line_ends_as_words else 0)
        if config.carry_memory:
            return EvaluationSegments(ids, config.evaluation_block_size, len(scored), num_words)
        return EvaluationBlocks(ids, config.evaluation_block_size, len(scored), num_words, config.stride)

    train: TrainingBlocks | StreamedBlocks | TrainingTracks
    if config.carry_memory:
        train = TrainingTracks(token_ids["train"], config.block_size, num_tracks)
    elif config.streaming:
        train = StreamedBlocks(partial(stream_training_text, config), tokenizer, config.block_size)
    else:
        train = TrainingBlocks(token_ids["train"], config.block_size)
    return PreparedText(
        train=train,
        validation=evaluation("validation"),
        test=evaluation("test") if "test" in texts else None,
        vocab_size=BYTE_VOCABULARY_SIZE if tokenizer is None else len(tokenizer),
    )


def _first_token_text(token_ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> bytes:
    decoded = tokenizer.decode(token_ids[:1].tolist(), clean_up_tokenization_spaces=False)
    return str(decoded).encode()
