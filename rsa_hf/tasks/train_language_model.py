"""Train and evaluate a causal language model: `rsa-hf train lm`, `rsa-hf evaluate lm`."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.utils import set_seed
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, PreTrainedModel

from rsa_hf.patching import is_patched
from rsa_hf.tasks.language_modeling import (
    EvaluationBlocks,
    EvaluationSegments,
    evaluate_language_model,
    load_language_modeling_tokenizer,
    prepare_language_modeling,
    set_memory,
)
from rsa_hf.tasks.text_data import LanguageModelingDataConfig
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.run import (
    load_model,
    make_accelerator,
    report_results,
    require_positions_known,
    require_tokens_known,
    train,
)
from rsa_hf.utils.locate import locate

__all__ = ["evaluate", "main", "require_fit"]


def main(arguments: Sequence[str]) -> None:
    """Train a language model, evaluate the best checkpoint, and write all results to the output folder.

    Args:
        arguments: A YAML file and `--key value` settings, as for `read_run_config`.

    Raises:
        OSError, ValueError: A file, a name or a setting is invalid.
        TrainingDivergedError: The loss is NaN or infinite.
    """
    config = read_run_config(arguments, LanguageModelingDataConfig)
    training = config.training
    accelerator = make_accelerator(training.mixed_precision)
    set_seed(training.seed)
    tokenizer_name = config.model.tokenizer or config.model.name_or_path
    if tokenizer_name is None:
        raise ValueError("model.tokenizer=None: a model from scratch needs one; 'bytes' is one that needs no files.")
    tokenizer = load_language_modeling_tokenizer(locate(tokenizer_name))
    rows = training.batch_size * training.gradient_accumulation_steps * accelerator.num_processes
    with accelerator.main_process_first():  # the other processes then find its downloads in the cache
        text = prepare_language_modeling(config.data, tokenizer, num_tracks=rows)
        model = load_model(AutoModelForCausalLM, config.model, config.rsa)
    require_fit(model, text.vocab_size, config.data)

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


def evaluate(name: str, split: str, arguments: Sequence[str]) -> dict[str, float]:
    """Evaluate a saved language model.

    Args:
        name: Folder of a checkpoint, or its name on the Hub.
        split: "validation" or "test".
        arguments: A YAML file and `--key value` settings; the data, the batch size and the tokenizer are used. Without
            `model.tokenizer`, the tokenizer is the checkpoint's.

    Returns:
        The result of `evaluate_language_model`.

    Raises:
        OSError, ValueError: A file, a name or a setting is invalid.
    """
    config = read_run_config(arguments, LanguageModelingDataConfig)
    tokenizer = load_language_modeling_tokenizer(locate(config.model.tokenizer or name))
    model = AutoModelForCausalLM.from_pretrained(locate(name))
    text = prepare_language_modeling(config.data, tokenizer)
    require_fit(model, text.vocab_size, config.data, training=False)
    blocks = {"validation": text.validation, "test": text.test}.get(split)
    if blocks is None:
        raise ValueError(f"the data has no split {split!r} to evaluate a model on.")
    return evaluate_language_model(model, blocks, config.training.eval_batch_size, memory=config.data.eval_memory)


def require_fit(
    model: PreTrainedModel, vocab_size: int, data: LanguageModelingDataConfig, training: bool = True
) -> None:
    """Check before a run that a model has the tokens and positions that the data needs, and the memory settings.

    Args:
        model: The model.
        vocab_size: The number of token ids of the data.
        data: Provides the block sizes and `eval_memory`.
        training: Whether the model is also trained.

    Raises:
        ValueError: It does not.
    """
    require_tokens_known(model, vocab_size)
    if training:
        require_positions_known(model, "data.block_size", data.block_size)
    setting = "data.block_size" if data.eval_block_size is None else "data.eval_block_size"
    require_positions_known(model, setting, data.evaluation_block_size)
    with set_memory(model, data.eval_memory):
        pass
