"""The score of a language model on a text: perplexity per token and per word, bits per byte, never mixed up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import default_collate

from rsa_hf.tasks.language_modeling import IGNORED_LABEL, EvaluationBlocks
from rsa_hf.tasks.metrics.score import LanguageModelingScore
from rsa_hf.tasks.segments import EvaluationSegments
from rsa_hf.training.carried import carried_from, segment_state_of
from rsa_hf.utils.checks import check_integer

__all__ = ["evaluate_language_model", "set_memory"]


def evaluate_language_model(
    model: torch.nn.Module,
    blocks: EvaluationBlocks | EvaluationSegments,
    batch_size: int,
    device: torch.device | str | None = None,
    memory: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Score a causal language model on every token of a text but the first.

    The model runs in eval mode and without gradients; each of its modules gets back the mode it was in.

    Args:
        model: Any causal language model of transformers: takes `input_ids` [B, T], gives `logits` [B, T, V].
        blocks: The text. Of `EvaluationSegments` the model carries its memory from each to the next, so that the
            whole text before a token is there to predict it from, as far as the model remembers.
        batch_size: Blocks in a batch. The result does not depend on it: nothing is padded, losses are summed.
            Segments wait for one another and are run one by one.
        device: Where the batches are put; None for where the model's parameters are. The model is not moved.
        memory: Entries of the model's config to set for as long as it is scored, such as `mem_len` of Transformer-XL;
            those that the model calls its `memory_settings`.

    Returns:
        The dict of `LanguageModelingScore.compute`.

    Raises:
        ValueError: A batch size below 1, a token id outside the model's vocabulary, segments for a model that carries
            no memory, or a memory setting that it does not have or whose value is not allowed.
    """
    check_integer("batch_size", batch_size, 1)
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = int(blocks.token_ids.max())
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the text has token id {largest} but the model's vocab_size is {vocab_size}, so ids up to "
            f"{vocab_size - 1} are allowed; use the model's own tokenizer, or resize_token_embeddings"
        )
    if device is None:
        device = next(model.parameters()).device
    score = LanguageModelingScore(blocks.num_bytes, blocks.num_words)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), set_memory(model, memory or {}):
            for logits, targets in _predictions(model, blocks, batch_size, device):
                # Half precision would round the losses before they are summed.
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
                score.update(losses.cpu().double().sum().item(), losses.numel())
    finally:
        for module, training in modes:
            module.training = training
    return score.compute()


@contextmanager
def set_memory(model: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Let a model remember more, or less, than its config says, while the context is open.

    Args:
        model: A model of transformers.
        settings: Entries of its config, which the model's `memory_settings` names: those that every call reads anew.

    Raises:
        ValueError: An entry that the model does not name, or a value that is not allowed.
    """
    if not settings:
        yield
        return
    allowed = getattr(model, "memory_settings", ())
    if unknown := [name for name in settings if name not in allowed]:
        raise ValueError(
            f"eval_memory has {unknown}; of a {type(model).__name__} "
            + (f"{list(allowed)} can be set for an evaluation" if allowed else "nothing can be set for an evaluation")
            + ": rename or remove them"
        )
    config = model.config
    try:
        type(config).from_dict({**config.to_dict(), **settings})  # which checks the values, together
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
    """Logits [n, V] and the tokens that they are to predict [n], of a whole text."""
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
    last = len(blocks) - 1  # the only block that may be short: alone, so that nothing is padded
    for begin in range(0, last, batch_size):
        yield default_collate([blocks[index] for index in range(begin, min(begin + batch_size, last))])
    yield default_collate([blocks[last]])
