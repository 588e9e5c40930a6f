"""Causal language modelling: tokenize a text, train a model on it, and score it.

The commands are `rsa-hf train lm` and `rsa-hf evaluate lm`.

Let a text have tokens t_0 … t_{N-1}. Every token but t_0 is scored exactly once, and all figures come from the summed
negative log-likelihood of those N - 1 tokens: *token* perplexity divides it by the number of tokens, *word* perplexity
by the words, and bits per byte by the bytes of the text after t_0. Only the last two are comparable between
tokenizers.

Words are separated by ASCII whitespace, as `wc -w` counts them. Published WikiText perplexities also count the <eos>
at every line end; `count_line_ends_as_words` does the same (WikiText-2 test: 241,211 words without, 245,569 with).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rsa_hf.patching import is_patched
from rsa_hf.tasks.text8 import text8_tokenizer
from rsa_hf.tasks.text_data import (
    IGNORED_LABEL,
    EvaluationBlocks,
    EvaluationSegments,
    LanguageModelingDataConfig,
    StreamedBlocks,
    TrainingBlocks,
    TrainingTracks,
    line_boundary,
    read_texts,
    stream_training_text,
)
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.calibrated import patch_calibrated
from rsa_hf.training.carried import carried_from, segment_state_of
from rsa_hf.training.run import (
    load_model,
    make_accelerator,
    report_results,
    require_positions_known,
    require_tokens_known,
    train,
)
from rsa_hf.utils.locate import locate

__all__ = [
    "PreparedText",
    "evaluate",
    "evaluate_language_model",
    "load_language_modeling_tokenizer",
    "main",
    "perplexities",
    "plain_model_and_rows",
    "prepare_language_modeling",
    "require_fit",
    "set_memory",
]

# Longer texts are tokenized in pieces: a tokenizer needs about a hundred bytes of memory per token.
TOKENIZED_PIECE_BYTES = 4 * 2**20


def main(arguments: Sequence[str]) -> None:
    """Train a language model, evaluate the best checkpoint, and write all results to the output folder.

    Args:
        arguments: a YAML file and `--key value` settings, as for `read_run_config`.
    """
    config = read_run_config(arguments, LanguageModelingDataConfig)
    training = config.training
    accelerator = make_accelerator(training)
    set_seed(training.seed)
    tokenizer = load_language_modeling_tokenizer(config.model.tokenizer or config.model.name_or_path)
    rows = training.batch_size * training.gradient_accumulation_steps * accelerator.num_processes
    with accelerator.main_process_first():  # the other processes then find its downloads in the cache
        text = prepare_language_modeling(config.data, tokenizer, num_tracks=rows)
        model = load_model(AutoModelForCausalLM, config.model, config.rsa)
    require_fit(model, text.vocab_size, config.data)
    if config.calibrate is not None:
        model = patch_calibrated(model, text.train, default_collate, config, accelerator)

    def score(model: PreTrainedModel, blocks: EvaluationBlocks | EvaluationSegments) -> dict[str, float]:
        return evaluate_language_model(model, blocks, training.eval_batch_size, memory=config.data.eval_memory)

    result = train(
        model,
        text.train,
        default_collate,
        lambda model: score(model, text.validation),
        training,
        best_metric="bits_per_byte",
        greater_is_better=False,
        tokenizer=tokenizer,
        settings=config.to_dict(),
        accelerator=accelerator,
    )
    if not accelerator.is_main_process:
        return
    best = AutoModelForCausalLM.from_pretrained(result.best_dir).to(accelerator.device)
    scores = {"validation": result.best_metrics}
    if text.test is not None:
        scores["test"] = score(best, text.test)
    name = "with RSA" if is_patched(best) else "plain"
    table = [["model", "text", "bits per byte", "word perplexity", "token perplexity", "tokens", "words", "bytes"]]
    for split, figure in scores.items():
        figures = (figure[key] for key in ("bits_per_byte", "word_perplexity", "token_perplexity"))
        counts = (figure[key] for key in ("num_tokens", "num_words", "num_bytes"))
        table.append([name, split, *(f"{value:.5g}" for value in figures), *(f"{value:,}" for value in counts)])
    report_results(config, result, scores, table, best)


def plain_model_and_rows(arguments: Sequence[str]) -> tuple[PreTrainedModel, Any, Any]:
    """The model of a run without RSA heads, its training data, and what makes a batch of rows.

    Args:
        arguments: a YAML file and `--key value` settings, as for `read_run_config`.
    """
    config = read_run_config(arguments, LanguageModelingDataConfig)
    tokenizer = load_language_modeling_tokenizer(config.model.tokenizer or config.model.name_or_path)
    text = prepare_language_modeling(config.data, tokenizer)
    model = load_model(AutoModelForCausalLM, config.model, None)
    require_fit(model, text.vocab_size, config.data)
    return model, text.train, default_collate


def evaluate(name: str, split: str, arguments: Sequence[str]) -> dict[str, float]:
    """Evaluate a saved language model.

    Args:
        name: folder of a checkpoint, or its name on the Hub.
        split: "validation" or "test".
        arguments: as for `main`; the data, the batch size and the tokenizer (by default the checkpoint's) are used.
    """
    config = read_run_config(arguments, LanguageModelingDataConfig)
    tokenizer = load_language_modeling_tokenizer(config.model.tokenizer or name)
    model = AutoModelForCausalLM.from_pretrained(locate(name))
    text = prepare_language_modeling(config.data, tokenizer)
    require_fit(model, text.vocab_size, config.data, training=False)
    blocks = {"validation": text.validation, "test": text.test}.get(split)
    if blocks is None:
        raise ValueError(f"the data has no split {split!r} to score. Choose validation, or test if the data has one.")
    return evaluate_language_model(model, blocks, config.training.eval_batch_size, memory=config.data.eval_memory)


def require_fit(
    model: PreTrainedModel, vocab_size: int, data: LanguageModelingDataConfig, training: bool = True
) -> None:
    """Raise a ValueError unless a model has the tokens, positions and memory settings that the data needs.

    Args:
        model: the model.
        vocab_size: the number of token ids of the data.
        data: provides the block sizes and `eval_memory`.
        training: whether the model is also trained.
    """
    require_tokens_known(model, vocab_size)
    if training:
        require_positions_known(model, "data.block_size", data.block_size)
    setting = "data.block_size" if data.eval_block_size is None else "data.eval_block_size"
    require_positions_known(model, setting, data.evaluation_block_size)
    with set_memory(model, data.eval_memory):
        pass


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass
class PreparedText:
    """A text that is ready for training and evaluation.

    Attributes:
        train: the training data: `StreamedBlocks` with `streaming`, `TrainingTracks` with `carry_memory`.
        validation: the evaluation data, with its counts of bytes and words: segments with `carry_memory`.
        test: the same for the test text, if there is one.
        vocab_size: the number of token ids that a model must have.
    """

    train: TrainingBlocks | StreamedBlocks | TrainingTracks
    validation: EvaluationBlocks | EvaluationSegments
    test: EvaluationBlocks | EvaluationSegments | None
    vocab_size: int


def prepare_language_modeling(
    config: LanguageModelingDataConfig, tokenizer: PreTrainedTokenizerBase | None, num_tracks: int = 1
) -> PreparedText:
    """Read, cut and tokenize the texts of a configuration, and count their bytes and words.

    No special tokens are added. Bytes and words are counted after the first token. If decoding that token does not
    return the beginning of the text (for instance, from a tokenizer that lower-cases), the whole text is counted.

    Args:
        config: selects the texts and their blocks.
        tokenizer: any tokenizer of transformers, or None for raw bytes.
        num_tracks: with `carry_memory`: the rows of a training step, over all processes and micro-batches.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file or data set cannot be used, or a text is too short, or not UTF-8 as a tokenizer needs it.
    """
    texts = read_texts(config)
    token_ids = {split: torch.cat([*_encode([text], tokenizer)]) for split, text in texts.items()}

    def evaluation(split: str) -> EvaluationBlocks | EvaluationSegments:
        ids, text = token_ids[split], texts[split]
        first = text[:1]
        if tokenizer is not None:
            first = str(tokenizer.decode(ids[:1].tolist(), clean_up_tokenization_spaces=False)).encode()
        scored = text.removeprefix(first)
        num_words = len(scored.split()) + (scored.count(b"\n") if config.count_line_ends_as_words else 0)
        if config.carry_memory:
            return EvaluationSegments(ids, config.evaluation_block_size, len(scored), num_words)
        return EvaluationBlocks(ids, config.evaluation_block_size, len(scored), num_words, config.stride)

    train: TrainingBlocks | StreamedBlocks | TrainingTracks
    if config.carry_memory:
        train = TrainingTracks(token_ids["train"], config.block_size, num_tracks)
    elif config.streaming:
        train = StreamedBlocks(lambda: _encode(stream_training_text(config), tokenizer), config.block_size)
    else:
        train = TrainingBlocks(token_ids["train"], config.block_size)
    return PreparedText(
        train=train,
        validation=evaluation("validation"),
        test=evaluation("test") if "test" in texts else None,
        vocab_size=256 if tokenizer is None else len(tokenizer),
    )


def load_language_modeling_tokenizer(name: str | None) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer by name.

    Args:
        name: "bytes" for raw bytes (a vocabulary of 256), "text8" for its 27 symbols, else what `AutoTokenizer` takes.

    Returns:
        The tokenizer; None for bytes.

    Raises:
        ValueError: there is no name.
    """
    if name is None:
        raise ValueError("model.tokenizer=None: a model from scratch needs one; 'bytes' is one that needs no files.")
    if name == "text8":
        return text8_tokenizer()
    return None if name == "bytes" else AutoTokenizer.from_pretrained(locate(name))


def _encode(chunks: Iterable[bytes], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[torch.Tensor]:
    """The token ids of a text, in pieces. They do not depend on how the text is cut into chunks."""
    for piece in _pieces(chunks):
        if tokenizer is None:
            yield torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        else:
            # Without special tokens, every scored token stands for a part of the text.
            ids = tokenizer(piece.decode(), add_special_tokens=False, verbose=False)["input_ids"]
            yield torch.tensor(ids, dtype=torch.int32, device="cpu")


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


# --- evaluation -----------------------------------------------------------------------------------------------------


def perplexities(nll_nats: float, num_tokens: int, num_words: int, num_bytes: int) -> dict[str, float]:
    """Perplexity per token and per word and bits per byte of a text.

    Args:
        nll_nats: the sum (not the mean) of the tokens' negative log-likelihoods, in nats.
        num_tokens: number of scored tokens.
        num_words: number of words of the scored text.
        num_bytes: number of bytes of the scored text.

    Returns:
        `loss_nats_per_token`; `token_perplexity`, its exponential; `word_perplexity`, NaN for a text without words;
        `bits_per_byte`; and the three counts. A perplexity that overflows a float is infinite; NaN stays NaN.
    """

    def exp(value: float) -> float:
        try:
            return math.exp(value)
        except OverflowError:
            return math.inf

    return {
        "loss_nats_per_token": nll_nats / num_tokens,
        "token_perplexity": exp(nll_nats / num_tokens),
        "word_perplexity": exp(nll_nats / num_words) if num_words else math.nan,
        "bits_per_byte": nll_nats / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
        "num_words": num_words,
        "num_bytes": num_bytes,
    }


def evaluate_language_model(
    model: torch.nn.Module,
    blocks: EvaluationBlocks | EvaluationSegments,
    batch_size: int,
    memory: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Score a causal language model on every token of a text but the first.

    The model runs in eval mode and without gradients. Afterwards each module is back in its previous mode.

    Args:
        model: a causal language model of transformers: takes `input_ids` [B, T], returns `logits` [B, T, V].
        blocks: the text. Over `EvaluationSegments`, the model carries its memory from each to the next.
        batch_size: blocks per batch. The result does not depend on it: nothing is padded, and losses are summed.
            Segments depend on each other and run one by one.
        memory: entries of the model's config to set during the evaluation, as for `set_memory`.

    Returns:
        The result of `perplexities`.

    Raises:
        ValueError: the model carries no memory over segments, or a memory setting is not allowed.
    """
    device = next(model.parameters()).device
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
    """Change entries of a model's config that are among its `memory_settings`, which every call reads.

    Raises:
        ValueError: the model does not allow an entry, or a value.
    """
    allowed = list(getattr(model, "memory_settings", ()))
    if unknown := [name for name in settings if name not in allowed]:
        raise ValueError(f"eval_memory={unknown}: a {type(model).__name__} allows {allowed or 'none'}.")
    before = {name: getattr(model.config, name) for name in settings}
    if settings:
        try:
            type(model.config).from_dict({**model.config.to_dict(), **settings})  # validates the values
        except (TypeError, ValueError) as error:
            raise ValueError(f"eval_memory={dict(settings)}: does not fit the model ({error}).") from error
    try:
        for name, value in settings.items():
            setattr(model.config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(model.config, name, value)


def _predictions(
    model: Any, blocks: EvaluationBlocks | EvaluationSegments, batch_size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits [n, V] and targets [n] of all scored tokens of a text, batch by batch."""
    if isinstance(blocks, EvaluationSegments):
        name, state = segment_state_of(model), None
        for i in range(len(blocks)):
            outputs = model(input_ids=blocks[i]["input_ids"][None].to(device), **{name: state})
            state = carried_from(outputs, name)
            yield outputs.logits[0], blocks[i]["shift_labels"].to(device)
        return
    last = len(blocks) - 1  # only the last block may be shorter, so it is a batch of its own
    batches = [range(begin, min(begin + batch_size, last)) for begin in range(0, last, batch_size)]
    for indices in [*batches, [last]]:
        batch = default_collate([blocks[index] for index in indices])
        targets = batch["labels"][:, 1:].to(device)
        logits = model(input_ids=batch["input_ids"].to(device)).logits[:, :-1]
        scored = targets != IGNORED_LABEL
        yield logits[scored], targets[scored]
