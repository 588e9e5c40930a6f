"""Causal language modelling: tokenize a text, train a model on it, and score it."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import EvalLoopOutput

from rsa_hf.patching import is_patched
from rsa_hf.tasks import text_blocks
from rsa_hf.tasks.text8 import text8_tokenizer
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, line_boundary, read_texts, stream_training_text
from rsa_hf.tasks.text_scores import evaluate_language_model, perplexities, set_memory
from rsa_hf.training import model_setup
from rsa_hf.training.arguments import ModelArguments, as_mapping, read_arguments
from rsa_hf.training.checkpoints import RunFolder, digest
from rsa_hf.training.rsa_trainer import RSATrainer
from rsa_hf.training.run_training import finish_run, train_to_end

# Longer texts are tokenized in pieces: a tokenizer needs about a hundred bytes of memory per token.
TOKENIZED_PIECE_BYTES = 4 * 2**20
LARGEST_SHOWN = 1e6  # perplexity in a table: a model that has just begun has a meaningless word perplexity


def main(arguments: Sequence[str]) -> None:
    """Train a language model, evaluate it, and write all results to the output folder; see `read_arguments`."""
    run = read_arguments(arguments, LanguageModelingDataConfig)
    args = run.training
    set_seed(args.seed)
    tokenizer = load_language_modeling_tokenizer(run.model.tokenizer_name or run.model.model_name_or_path)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    with args.main_process_first():  # the other processes then find its downloads in the cache
        text = prepare_language_modeling(run.data, tokenizer, num_tracks=rows)
        folder = RunFolder(run, text.digest)
        if folder.had_finished():
            return
        model = _plain_model(run.model, tokenizer, run.data)
    if args.should_save:
        print(f"data: {run.data.origin}")
    calibration = model_setup.patch_for_run(model, text.train, default_collate, run)
    args.remove_unused_columns = False
    trainer = LanguageModelTrainer(
        model=model,
        args=args,
        train_dataset=text.train,
        eval_dataset=text.validation,
        data_collator=default_collate,
        processing_class=tokenizer,
        eval_memory=as_mapping("eval_memory", run.data.eval_memory),
    )
    train_to_end(trainer, folder, perplexities(1.0, 1, 1, 1))
    step = trainer.state.best_global_step if args.load_best_model_at_end else trainer.state.global_step
    scores = {"validation": trainer.scores.get(step) or trainer.score(text.validation)}
    if text.test is not None:
        scores["test"] = trainer.score(text.test)
    name = "with RSA" if is_patched(model) else "plain"
    table = [["model", "text", "bits per byte", "word perplexity", "token perplexity", "tokens", "words", "bytes"]]
    for split, figure in scores.items():
        figures = (figure[key] for key in ("bits_per_byte", "word_perplexity", "token_perplexity"))
        counts = (figure[key] for key in ("num_tokens", "num_words", "num_bytes"))
        shown = (f"{value:.5g}" if value <= LARGEST_SHOWN else "> 1e6" for value in figures)
        table.append([name, split, *shown, *(f"{value:,}" for value in counts)])
    finish_run(trainer, run, folder, {**scores, "calibration": calibration}, table)


class LanguageModelTrainer(RSATrainer):
    """An `RSATrainer` that evaluates with `evaluate_language_model`: `eval_bits_per_byte` and the other metrics.

    `eval_memory` is its `memory`; `eval_dataset` is the `EvaluationBlocks` or `EvaluationSegments` to score.
    """

    def __init__(self, *, eval_memory: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.eval_memory = eval_memory
        self.scores: dict[int | None, dict[str, float]] = {}  # of the evaluation at each step

    def score(self, blocks: text_blocks.EvaluationBlocks | text_blocks.EvaluationSegments) -> dict[str, float]:
        """Score a text. Several processes share its blocks, except under FSDP, where each process scores all."""
        return evaluate_language_model(
            self.model_wrapped if self.is_fsdp_enabled else self.model,
            blocks,
            self.args.per_device_eval_batch_size,
            self.eval_memory,
            progress=self.args.should_save and not self.args.disable_tqdm,
            accelerator=None if self.is_fsdp_enabled else self.accelerator,
        )

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **keywords: Any) -> Any:
        """As `Trainer.evaluation_loop`, without predictions; names of the metrics get the prefix."""
        scores = self.scores[self.state.global_step] = self.score(dataloader.dataset)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        metrics[f"{metric_key_prefix}_loss"] = scores["loss_nats_per_token"]
        return EvalLoopOutput(None, None, metrics, len(dataloader.dataset))  # type: ignore[arg-type]  # no predictions


def _plain_model(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase | None, data: LanguageModelingDataConfig
) -> PreTrainedModel:
    model = model_setup.load_model(AutoModelForCausalLM, arguments)
    model_setup.require_inputs_fit(model, tokenizer, data.block_size, "block_size")
    _require_fit(model, tokenizer, data)
    return model


def plain_model_and_rows(arguments: Sequence[str]) -> tuple[PreTrainedModel, Any, Any]:
    """The model of a run without RSA heads, its training data, and the collator of its rows."""
    run = read_arguments(arguments, LanguageModelingDataConfig)
    tokenizer = load_language_modeling_tokenizer(run.model.tokenizer_name or run.model.model_name_or_path)
    text = prepare_language_modeling(run.data, tokenizer)
    return _plain_model(run.model, tokenizer, run.data), text.train, default_collate


def evaluate(name: str, split: str, arguments: Sequence[str]) -> dict[str, float]:
    """Score a saved language model, a folder or a name on the Hub, on the split "validation" or "test".

    The settings used are the text of this split, `per_device_eval_batch_size` and the tokenizer (by default the
    checkpoint's).
    """
    run = read_arguments(arguments, LanguageModelingDataConfig)
    tokenizer = load_language_modeling_tokenizer(run.model.tokenizer_name or name)
    model = model_setup.load_with_head(AutoModelForCausalLM, name)
    text = prepare_language_modeling(run.data, tokenizer, only=split)
    _require_fit(model, tokenizer, run.data)
    blocks = {"validation": text.validation, "test": text.test}.get(split)
    if blocks is None:
        raise ValueError(f"the data has no split {split!r} to score. Choose validation, or test if the data has one.")
    print(f"scored: {split} of {run.data.files.get(split, run.data.origin)}", file=sys.stderr)
    model.to(run.training.device)  # type: ignore[arg-type]  # transformers' decorator
    memory = as_mapping("eval_memory", run.data.eval_memory)
    return evaluate_language_model(model, blocks, run.training.per_device_eval_batch_size, memory, progress=True)


def _require_fit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, data: LanguageModelingDataConfig
) -> None:
    """Raise a ValueError unless a model accepts the inputs of an evaluation and its memory settings."""
    setting = "block_size" if data.eval_block_size is None else "eval_block_size"
    model_setup.require_inputs_fit(model, tokenizer, data.evaluation_block_size, setting)
    model_setup.require_causal(model)
    with set_memory(model, as_mapping("eval_memory", data.eval_memory)):
        pass


@dataclass
class PreparedText:
    """A text that is ready for training and evaluation: in tracks and segments with `carry_memory`, else in blocks."""

    train: text_blocks.TrainingBlocks | text_blocks.StreamedBlocks | text_blocks.TrainingTracks
    validation: text_blocks.EvaluationBlocks | text_blocks.EvaluationSegments
    test: text_blocks.EvaluationBlocks | text_blocks.EvaluationSegments | None
    digest: str  # of the texts that are not streamed


def prepare_language_modeling(
    config: LanguageModelingDataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    num_tracks: int = 1,
    only: str | None = None,
) -> PreparedText:
    """Read, cut and tokenize the texts of a configuration, and count their bytes and words.

    No special tokens are added. Bytes and words are counted after the first token. If decoding that token does not
    return the beginning of the text (for instance, from a tokenizer that lower-cases), the whole text is counted.

    Args:
        config: selects the texts and their blocks.
        tokenizer: any tokenizer of transformers, or None for raw bytes.
        num_tracks: with `carry_memory`: the rows of a training step, over all processes and micro-batches.
        only: the one split to prepare, "validation" or "test", to score it; the others are None. None: all.

    Raises:
        ValueError: a file or data set cannot be used, or a text is too short, or not UTF-8 if a tokenizer needs it.
    """
    texts = read_texts(config, only)
    token_ids = {split: torch.cat([*_encode([text], tokenizer, split)]) for split, text in texts.items()}

    def evaluation(split: str) -> Any:
        if split not in texts:
            return None
        ids, text = token_ids[split], texts[split]
        if len(ids) < 2:
            raise ValueError(f"the {split} text has {len(ids)} token: 2 or more are needed to score it.")
        first = text[:1]
        if tokenizer is not None:
            first = str(tokenizer.decode(ids[:1].tolist(), clean_up_tokenization_spaces=False)).encode()
        scored = text.removeprefix(first)
        num_words = len(scored.split()) + (scored.count(b"\n") if config.count_line_ends_as_words else 0)
        if config.carry_memory:
            return text_blocks.EvaluationSegments(ids, config.evaluation_block_size, len(scored), num_words)
        return text_blocks.EvaluationBlocks(ids, config.evaluation_block_size, len(scored), num_words, config.stride)

    train: Any = None
    if only is None and config.carry_memory:
        train = text_blocks.TrainingTracks(token_ids["train"], config.block_size, num_tracks)
    elif only is None and config.streaming:
        train = text_blocks.StreamedBlocks(
            lambda: _encode(stream_training_text(config), tokenizer, "train"), config.block_size
        )
    elif only is None:
        train = text_blocks.TrainingBlocks(token_ids["train"], config.block_size)
    return PreparedText(train, evaluation("validation"), evaluation("test"), digest(texts.values()))


def load_language_modeling_tokenizer(name: str | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a name: None for "bytes" (a vocabulary of 256), `text8_tokenizer`, or `load_tokenizer`'s."""
    if name is None:
        raise ValueError(
            "model_name_or_path=None: name a pretrained model, on the Hub or a folder; or for one from scratch a "
            "model_type and a tokenizer_name, such as 'bytes', which needs no files."
        )
    if name == "text8":
        return text8_tokenizer()
    return None if name == "bytes" else model_setup.load_tokenizer(name)


def _encode(chunks: Iterable[bytes], tokenizer: PreTrainedTokenizerBase | None, split: str) -> Iterator[torch.Tensor]:
    """The token ids of a split's text, in pieces. They do not depend on how the text is cut into chunks."""
    start = 0  # of the piece
    for piece in tqdm(_pieces(chunks), desc="tokenising", unit="piece", leave=False, delay=5):
        if tokenizer is None:
            yield torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        else:
            try:
                # Without special tokens, every scored token stands for a part of the text.
                ids = tokenizer(piece.decode(), add_special_tokens=False, verbose=False)["input_ids"]
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"the {split} text is not UTF-8, which a tokenizer needs: {error.reason} at byte "
                    f"{start + error.start}. Convert it, or choose bytes as tokenizer_name."
                ) from error
            except Exception as error:
                if type(error) is not Exception:  # tokenizers raises Exception itself for a character that text8 lacks
                    raise
                raise ValueError(f"the {split} text does not fit the tokenizer ({error}). Choose another.") from error
            yield torch.tensor(ids, dtype=torch.int32, device="cpu")
        start += len(piece)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut a text into pieces, each tokenized in one call; cuts are after line ends if possible."""
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
