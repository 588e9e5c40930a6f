"""The scores of a language model: perplexities and bits per byte of a text.

Every token of a text but the first is scored exactly once. All figures come from the sum of their negative
log-likelihoods: *token* perplexity divides it by the number of tokens, *word* perplexity by the words, and bits per
byte by the bytes of the text after the first token. Only the last two are comparable between tokenizers.

Words are separated by ASCII whitespace, as `wc -w` counts them. Published WikiText perplexities also count the <eos>
at every line end; `count_line_ends_as_words` does the same (WikiText-2 test: 241,211 words without, 245,569 with).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
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
    carried = isinstance(blocks, EvaluationSegments)
    index, count = 0, 1
    if accelerator is not None and not carried:
        index, count = accelerator.process_index, accelerator.num_processes
    last, size = len(blocks) - 1, 1 if carried else batch_size
    mine = range(len(blocks))[index::count]
    # Only the last block may be shorter, so it is a batch of its own.
    whole = [i for i in mine if i != last]
    batches = [whole[begin : begin + size] for begin in range(0, len(whole), size)]
    if last in mine:
        batches.append([last])
    nll_nats, num_tokens = 0.0, 0
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), set_memory(model, memory or {}):
            name, state = segment_state_of(model) if carried else "", None
            for indices in tqdm(batches, "evaluating", unit="batch", leave=False, delay=2, disable=not progress):
                batch = default_collate([blocks[i] for i in indices])
                outputs = model(input_ids=batch["input_ids"].to(device), **({name: state} if carried else {}))
                if carried:
                    state = carried_from(outputs, name)
                    logits, targets = outputs.logits, batch["shift_labels"].to(device)
                else:
                    logits, targets = outputs.logits[:, :-1], batch["labels"][:, 1:].to(device)
                scored = targets != IGNORED_LABEL
                # Half precision would round the losses before they are summed.
                logits = logits[scored].to(torch.promote_types(logits.dtype, torch.float32))
                losses = cross_entropy(logits, targets[scored], reduction="none")
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
    """Change entries of a model's config for a while, only its `memory_settings`, which every call reads."""
    allowed = list(getattr(model, "memory_settings", ()))
    if unknown := [name for name in settings if name not in allowed]:
        raise ValueError(f"eval_memory={unknown}: a {type(model).__name__} allows {allowed or 'none'}.")
    before = {name: getattr(model.config, name) for name in settings}
    if settings:
        type(model.config).from_dict({**model.config.to_dict(), **settings})  # validates the values
    try:
        for name, value in settings.items():
            setattr(model.config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(model.config, name, value)
