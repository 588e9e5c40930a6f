"""Causal language modelling: tokenize a text, cut it into blocks, and score a model on it.

Let a text have tokens t_0 … t_{N-1}. Every token but t_0 is scored exactly once, and all figures come from the summed
negative log-likelihood of those N - 1 tokens: *token* perplexity divides it by the number of tokens, *word* perplexity
by the words, and bits per byte by the bytes of the text after t_0. Only the last two are comparable between
tokenizers.

Words are separated by ASCII whitespace, as `wc -w` counts them. Published WikiText perplexities also count the <eos>
at every line end; `count_line_ends_as_words` does the same (WikiText-2 test: 241,211 words without, 245,569 with).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rsa_hf.tasks.metrics import perplexities
from rsa_hf.tasks.text8 import text8_tokenizer
from rsa_hf.tasks.text_blocks import (
    IGNORED_LABEL,
    EvaluationBlocks,
    EvaluationSegments,
    StreamedBlocks,
    TrainingBlocks,
    TrainingTracks,
)
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, line_boundary, read_texts, stream_training_text
from rsa_hf.training.carried import carried_from, segment_state_of

__all__ = [
    "EvaluationBlocks",
    "EvaluationSegments",
    "LanguageModelingDataConfig",
    "PreparedText",
    "StreamedBlocks",
    "TrainingBlocks",
    "TrainingTracks",
    "evaluate_language_model",
    "load_language_modeling_tokenizer",
    "prepare_language_modeling",
    "set_memory",
]

BYTE_VOCABULARY_SIZE = 256
# A tokenizer needs about a hundred bytes of memory per token, so longer texts are tokenized in pieces.
TOKENIZED_PIECE_BYTES = 4 * 2**20


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass
class PreparedText:
    """A text that is ready for training and evaluation.

    Attributes:
        train: The training data: `StreamedBlocks` with `streaming`, `TrainingTracks` with `carry_memory`.
        validation: The evaluation data, with its counts of bytes and words: segments with `carry_memory`.
        test: The same for the test text, if there is one.
        vocab_size: The number of token ids that a model must have.
    """

    train: TrainingBlocks | StreamedBlocks | TrainingTracks
    validation: EvaluationBlocks | EvaluationSegments
    test: EvaluationBlocks | EvaluationSegments | None
    vocab_size: int


def load_language_modeling_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer by name.

    Args:
        name: "bytes" for raw bytes (a vocabulary of 256), "text8" for its 27 symbols, else what `AutoTokenizer` takes.

    Returns:
        The tokenizer; None for bytes.
    """
    if name == "text8":
        return text8_tokenizer()
    return None if name == "bytes" else AutoTokenizer.from_pretrained(name)


def prepare_language_modeling(
    config: LanguageModelingDataConfig, tokenizer: PreTrainedTokenizerBase | None, num_tracks: int = 1
) -> PreparedText:
    """Read, cut and tokenize the texts of a configuration, and count their bytes and words.

    No special tokens are added. Texts above 4 MiB are tokenized in pieces that end with a line. Bytes and words are
    counted after the first token. If decoding that token does not return the beginning of the text (for instance, from
    a tokenizer that lower-cases), the whole text is counted.

    Args:
        config: Selects the texts and their blocks.
        tokenizer: Any tokenizer of transformers, or None for raw bytes.
        num_tracks: With `carry_memory`: the rows of a training step, over all processes and micro-batches.

    Returns:
        The data sets of each split.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file or data set cannot be used, or a text is too short.
    """
    texts = read_texts(config)
    token_ids = {split: torch.cat([*_encode(split, [text], tokenizer)]) for split, text in texts.items()}

    def evaluation(split: str) -> EvaluationBlocks | EvaluationSegments:
        ids, text = token_ids[split], texts[split]
        first = text[:1] if tokenizer is None else _decode(ids[:1], tokenizer)
        scored = text.removeprefix(first)
        num_words = len(scored.split()) + (scored.count(b"\n") if config.count_line_ends_as_words else 0)
        if config.carry_memory:
            return EvaluationSegments(ids, config.evaluation_block_size, len(scored), num_words)
        return EvaluationBlocks(ids, config.evaluation_block_size, len(scored), num_words, config.stride)

    train: TrainingBlocks | StreamedBlocks | TrainingTracks
    if config.carry_memory:
        train = TrainingTracks(token_ids["train"], config.block_size, num_tracks)
    elif config.streaming:
        train = StreamedBlocks(lambda: _encode("train", stream_training_text(config), tokenizer), config.block_size)
    else:
        train = TrainingBlocks(token_ids["train"], config.block_size)
    return PreparedText(
        train=train,
        validation=evaluation("validation"),
        test=evaluation("test") if "test" in texts else None,
        vocab_size=BYTE_VOCABULARY_SIZE if tokenizer is None else len(tokenizer),
    )


def _encode(split: str, chunks: Iterable[bytes], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[torch.Tensor]:
    """The token ids of a text, in pieces. They do not depend on how the text is cut into chunks."""
    for piece in _pieces(chunks):
        if tokenizer is None:
            yield torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            continue
        try:
            # Without special tokens, every scored token stands for a part of the text.
            ids = tokenizer(piece.decode(), add_special_tokens=False, verbose=False)["input_ids"]
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the {split} text is not UTF-8 ({error}); convert it, or use tokenizer 'bytes'"
            ) from error
        except Exception as error:
            if "[UNK]" not in str(error):  # the tokenizers library raises a plain Exception for unknown characters
                raise
            raise ValueError(
                f"the {split} text has characters that the tokenizer has no token for ({error}); clean it "
                "(scripts/make_text8.py for text8), or choose another tokenizer"
            ) from error
        yield torch.tensor(ids, dtype=torch.int32)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut a text into pieces to tokenize at once, after line ends if possible."""
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


def _decode(token_ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> bytes:
    return str(tokenizer.decode(token_ids.tolist(), clean_up_tokenization_spaces=False)).encode()


# --- evaluation -----------------------------------------------------------------------------------------------------


def evaluate_language_model(
    model: torch.nn.Module,
    blocks: EvaluationBlocks | EvaluationSegments,
    batch_size: int,
    device: torch.device | str | None = None,
    memory: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Score a causal language model on every token of a text but the first.

    The model runs in eval mode and without gradients. Afterwards each module is back in its previous mode.

    Args:
        model: A causal language model of transformers: takes `input_ids` [B, T], returns `logits` [B, T, V].
        blocks: The text. Over `EvaluationSegments`, the model carries its memory from each to the next.
        batch_size: Blocks per batch. The result does not depend on it: nothing is padded, and losses are summed.
            Segments depend on each other and run one by one.
        device: The device of the batches. None: that of the model's parameters. The model is not moved.
        memory: Entries of the model's config to set during the evaluation, as for `set_memory`.

    Returns:
        The result of `perplexities`.

    Raises:
        ValueError: A token id is outside the model's vocabulary, the model carries no memory over segments, or a
            memory setting is not allowed.
    """
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = int(blocks.token_ids.max())
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the text has token id {largest}, but the model's vocab_size is {vocab_size}; use the model's own "
            "tokenizer, or resize_token_embeddings"
        )
    device = next(model.parameters()).device if device is None else device
    nll_nats, num_tokens = 0.0, 0
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), set_memory(model, memory or {}):
            for logits, targets in _predictions(model, blocks, batch_size, device):
                # Half precision would round the losses before they are summed.
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
                nll_nats += losses.cpu().double().sum().item()
                num_tokens += losses.numel()
    finally:
        for module, training in modes:
            module.training = training
    return perplexities(nll_nats, num_tokens, blocks.num_words, blocks.num_bytes)


@contextmanager
def set_memory(model: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Change the memory settings of a model's config within a `with` block.

    Args:
        model: A model of transformers.
        settings: Entries of its config, out of the model's attribute `memory_settings`: those that every call reads.

    Raises:
        ValueError: The model does not allow an entry, or a value.
    """
    if not settings:
        yield
        return
    allowed = list(getattr(model, "memory_settings", ()))
    if unknown := [name for name in settings if name not in allowed]:
        raise ValueError(f"eval_memory has {unknown}; of a {type(model).__name__}, allowed are {allowed or 'none'}")
    config = model.config
    try:
        type(config).from_dict({**config.to_dict(), **settings})  # validates the values
    except (TypeError, ValueError) as error:
        raise ValueError(f"eval_memory is {dict(settings)}, which does not fit the model: {error}") from error
    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _predictions(
    model: Any, blocks: EvaluationBlocks | EvaluationSegments, batch_size: int, device: torch.device | str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits [n, V] and targets [n] of all scored tokens of a text, batch by batch."""
    if isinstance(blocks, EvaluationSegments):
        name, state = segment_state_of(model), None
        for i in range(len(blocks)):
            outputs = model(input_ids=blocks[i]["input_ids"][None].to(device), **{name: state})
            state = carried_from(outputs, name)
            yield outputs.logits[0], blocks[i]["shift_labels"].to(device)
        return
    for batch in _batches_of_equal_length(blocks, batch_size):
        targets = batch["labels"][:, 1:].to(device)
        logits = model(input_ids=batch["input_ids"].to(device)).logits[:, :-1]
        scored = targets != IGNORED_LABEL
        yield logits[scored], targets[scored]


def _batches_of_equal_length(blocks: EvaluationBlocks, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    last = len(blocks) - 1  # only the last block may be shorter, so it is a batch of its own
    for begin in range(0, last, batch_size):
        yield default_collate([blocks[index] for index in range(begin, min(begin + batch_size, last))])
    yield default_collate([blocks[last]])
