"""Train a causal language model, patched or plain, and score one: what `scripts/train_language_model.py` runs."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.utils import set_seed
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, PreTrainedModel

from rsa_hf.patching import is_patched
from rsa_hf.tasks.language_modeling import (
    EvaluationBlocks,
    LanguageModelingDataConfig,
    load_language_modeling_tokenizer,
    prepare_language_modeling,
)
from rsa_hf.tasks.perplexity import evaluate_language_model, set_memory
from rsa_hf.tasks.segments import EvaluationSegments
from rsa_hf.training.arguments import read_run_config
from rsa_hf.training.loop import make_accelerator, train
from rsa_hf.training.run import (
    load_model,
    report_results,
    require_positions_known,
    require_tokens_known,
)
from rsa_hf.utils.locate import locate

__all__ = ["evaluate", "main"]


def main(arguments: Sequence[str]) -> None:
    """Train, keep the best model, score it, and leave all of it in the output folder.

    Args:
        arguments: a YAML file and `--key value` settings, as `read_run_config` takes them.

    Raises:
        OSError, ValueError: a file, a name or a setting does not fit.
        TrainingDivergedError: the loss is no number any longer.
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
    with accelerator.main_process_first():  # the others then find what the first has downloaded
        text = prepare_language_modeling(config.data, tokenizer, num_tracks=rows)
        model = load_model(AutoModelForCausalLM, config.model, config.rsa)
    require_tokens_known(model, text.vocab_size)
    require_positions_known(model, "data.block_size", config.data.block_size)
    require_positions_known(model, "data.eval_block_size", config.data.evaluation_block_size)
    with set_memory(model, config.data.eval_memory):
        pass  # a mistake should show now, not at the first evaluation

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
    """Score a saved language model.

    Args:
        name: folder of the checkpoint, or its name on the Hub.
        split: "validation" or "test".
        arguments: a YAML file and `--key value` settings, of which those of the data, the batch size and the tokenizer
            count; where the settings name no tokenizer it is the model's own.

    Returns:
        What `evaluate_language_model` returns.

    Raises:
        OSError, ValueError: a file, a name or a setting does not fit.
    """
    config = read_run_config(arguments, LanguageModelingDataConfig)
    tokenizer = load_language_modeling_tokenizer(locate(config.model.tokenizer or name))
    model = AutoModelForCausalLM.from_pretrained(locate(name))
    text = prepare_language_modeling(config.data, tokenizer)
    require_tokens_known(model, text.vocab_size)
    setting = "data.block_size" if config.data.eval_block_size is None else "data.eval_block_size"
    require_positions_known(model, setting, config.data.evaluation_block_size)
    blocks = {"validation": text.validation, "test": text.test}.get(split)
    if blocks is None:
        raise ValueError(f"the data has no split {split!r} to score a model on.")
    return evaluate_language_model(model, blocks, config.training.eval_batch_size, memory=config.data.eval_memory)
