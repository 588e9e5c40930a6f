"""The scores of a language model: perplexities and bits per byte of a text.

Every token of a text but the first is scored exactly once. All figures come from the sum of their negative
log-likelihoods: *token* perplexity divides it by the number of tokens, *word* perplexity by the words, and bits per
byte by the bytes of the text after the first token. Only the last two are comparable between tokenizers.

Words are separated by ASCII whitespace, as `wc -w` counts them. Published WikiText perplexities also count the <eos>
at every line end; `count_line_ends_as_words` does the same (WikiText-2 test: 241,211 words without, 245,569 with).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import default_collate
from tqdm.auto import tqdm

from rsa_hf.tasks.text_blocks import IGNORED_LABEL, EvaluationBlocks, EvaluationSegments
from rsa_hf.training.carried import carried_from, segment_state_of


def perplexities(nll_nats: float, num_tokens: int, num_words: int, num_bytes: int) -> dict[str, float]:
    """Perplexity per token and per word and bits per byte of a text, from the sum of its tokens' losses in nats.

    Returns:
        `loss_nats_per_token`; `token_perplexity`; `word_perplexity`, NaN for a text without words; `bits_per_byte`;
        and the three counts. A perplexity that overflows a float is infinite.
    """
    return {
        "loss_nats_per_token": nll_nats / num_tokens,
        "token_perplexity": _exp(nll_nats / num_tokens),
        "word_perplexity": _exp(nll_nats / num_words) if num_words else math.nan,
        "bits_per_byte": nll_nats / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
        "num_words": num_words,
        "num_bytes": num_bytes,
    }


def _exp(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64, device="cpu").exp().item()  # math.exp raises where this is inf


def evaluate_language_model(
    model: Any,
    blocks: EvaluationBlocks | EvaluationSegments,
    batch_size: int,
    memory: Mapping[str, Any] | None = None,
    progress: bool = False,
    accelerator: Accelerator | None = None,
) -> dict[str, float]:
    """Score a causal language model on every token of a text but the first, in eval mode and without gradients.

    Args:
        model: a causal language model of transformers: takes `input_ids` [B, T], returns `logits` [B, T, V].
        blocks: the text. Over `EvaluationSegments`, which run one by one, the model carries its memory.
        batch_size: blocks per batch. The result does not depend on it: nothing is padded, and losses are summed.
        memory: entries of the model's config to set during the evaluation, as for `set_memory`.
        progress: whether to show a bar after some seconds.
        accelerator: its processes share the blocks; None: each scores all. Segments are never shared.

    Returns:
        The result of `perplexities`.

    Raises:
        ValueError: the model carries no memory over segments, or a memory setting is not allowed.
    """
    index, count, steps = 0, 1, len(blocks)
    if isinstance(blocks, EvaluationBlocks):
        if accelerator is not None:
            index, count = accelerator.process_index, accelerator.num_processes
        steps = math.ceil(len(blocks) / (count * batch_size))
    nll_nats, num_tokens = 0.0, 0
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), set_memory(model, memory or {}):
            predictions = _predictions(model, blocks, batch_size, range(len(blocks))[index::count])
            bar = tqdm(predictions, "evaluating", steps, unit="batch", leave=False, delay=2, disable=not progress)
            for logits, targets in bar:
                # Half precision would round the losses before they are summed.
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
                nll_nats += losses.cpu().double().sum().item()
                num_tokens += losses.numel()
    finally:
        for module, training in modes:
            module.training = training
    if accelerator is not None and count > 1:
        sums = torch.tensor([nll_nats, num_tokens], dtype=torch.float64, device=accelerator.device)
        nll_nats, num_tokens = accelerator.reduce(sums, "sum").tolist()
    return perplexities(nll_nats, int(num_tokens), blocks.num_words, blocks.num_bytes)


@contextmanager
def set_memory(model: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Change entries of a model's config, if they are among its `memory_settings`, which every call reads."""
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
    model: Any, blocks: EvaluationBlocks | EvaluationSegments, batch_size: int, indices: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits [n, V] and targets [n] of the scored tokens of some blocks, or of all segments, batch by batch."""
    device = next(model.parameters()).device
    if isinstance(blocks, EvaluationSegments):
        name, state = segment_state_of(model), None
        for i in range(len(blocks)):
            outputs = model(input_ids=blocks[i]["input_ids"][None].to(device), **{name: state})
            state = carried_from(outputs, name)
            yield outputs.logits[0], blocks[i]["shift_labels"].to(device)
        return
    last = len(blocks) - 1  # only the last block may be shorter, so it is a batch of its own
    whole = [i for i in indices if i != last]
    batches = [whole[begin : begin + batch_size] for begin in range(0, len(whole), batch_size)]
    for batch_indices in [*batches, *([[last]] if last in indices else [])]:
        batch = default_collate([blocks[index] for index in batch_indices])
        targets = batch["labels"][:, 1:].to(device)
        logits = model(input_ids=batch["input_ids"].to(device)).logits[:, :-1]
        scored = targets != IGNORED_LABEL
        yield logits[scored], targets[scored]
