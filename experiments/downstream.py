"""What a byte-level model can do, beside its likelihood, which alone may mislead: it writes, and it recalls.

* Samples: the model continues beginnings of the validation text. SmolLM2, which has read far more, judges them by its
  bits per byte; a model that repeats itself has an easy text, and few different pairs of words.
* A made-up word in a text, and again half a block later: the bits that its last letters need less the second time.
* Key-value pairs (multi-query associative recall; Arora et al., 2023, Zoology): after a short training on rows of
  random pairs, the share of keys whose value the model names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.byte_models import Shape
from experiments.pretrained import load_pretrained
from experiments.runner.fit import adamw_with_linear_decay, default_device, fit
from experiments.runner.summary import Values
from rsa_hf.tasks.language_modeling import PreparedText
from rsa_hf.tasks.text_blocks import IGNORED_LABEL

JUDGED, TEXT_JUDGED = "bits per byte of samples under SmolLM2", "bits per byte of the text under SmolLM2"
WORD_PAIRS, TEXT_WORD_PAIRS = "different word pairs in samples", "different word pairs in the text"
WORD_RECALLED = "bits per byte saved on a made-up word"
PAIRS_RECALLED = "key-value pairs recalled"
ROWS, SCORED_PAIRS = 32, 256  # texts, and rows of key-value pairs, to score
LETTERS, KNOWN = 8, 2  # of a made-up word; the first ones say which word it is


def score_downstream(
    model: Any, text: PreparedText, shape: Shape, *, learning_rate: float, steps: int, judge: str, seed: int
) -> Values:
    """All scores of a causal model of bytes; the last one trains it on key-value pairs, in place.

    Args:
        model: has a position for each byte of a block.
        text: its validation text is continued, and gets made-up words.
        shape: size of a block and of a training step.
        learning_rate: of the training on key-value pairs, with its number of steps.
        steps: see `learning_rate`.
        judge: name of the judge, as `load_pretrained` takes it; empty: samples are not judged.
        seed: of samples, made-up words and pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = text.validation.token_ids.long()
    rows = tokens[: len(tokens) // shape.block * shape.block].view(-1, shape.block)[:ROWS]
    values: Values = {}
    if judge:
        beginning = shape.block // 4
        samples = write_samples(model, rows[:, :beginning], shape.block - beginning, seed)
        for names, continued in (
            ((JUDGED, WORD_PAIRS), samples),
            ((TEXT_JUDGED, TEXT_WORD_PAIRS), [bytes(row.tolist()) for row in rows[:, beginning:]]),
        ):
            values |= zip(names, (bits_under_judge(continued, judge), different_word_pairs(continued)), strict=True)
    values[WORD_RECALLED] = saved_on_made_up_words(model, *made_up_word_rows(rows, generator))
    values[PAIRS_RECALLED] = recalled_pairs(model, shape, learning_rate=learning_rate, steps=steps, seed=seed)
    return values


def write_samples(model: Any, beginnings: Tensor, length: int, seed: int) -> list[bytes]:
    """Continue beginnings [N, B] by this number of bytes, drawn from the model's distribution."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        device = next(model.parameters()).device
        prompts = beginnings.to(device)
        found = model.eval().generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=length,
            pad_token_id=0,
        )
    return [bytes(row.tolist()) for row in found[:, beginnings.shape[1] :]]


@lru_cache(maxsize=1)
def _judge(name: str) -> tuple[Any, Any]:
    model, tokenizer = load_pretrained(name)
    return model.eval().to(default_device()), tokenizer


@torch.no_grad()
def bits_under_judge(texts: Sequence[bytes], judge: str) -> float:
    """Bits per byte of texts, each read on its own after a beginning-of-text token; bytes that are no UTF-8 count."""
    model, tokenizer = _judge(judge)
    nats = 0.0
    for text in texts:
        tokens = tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[tokenizer.bos_token_id, *tokens]], device=model.device)
        nats += float(F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    return nats / math.log(2) / sum(map(len, texts))


def different_word_pairs(texts: Sequence[bytes]) -> float:
    """Different pairs of neighbouring words over all pairs (Li et al., 2016, distinct-2)."""
    pairs = [pair for text in texts for pair in pairwise(text.split())]
    return len(set(pairs)) / len(pairs) if pairs else 0.0


def made_up_word_rows(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts [N, T] in which a made-up word occurs twice, half a row apart, the second time at the end.

    Returns:
        The texts, and where the last letters of both occurrences are: [2, LETTERS − KNOWN].
    """
    N, T = rows.shape
    words = torch.randint(ord("a"), ord("z") + 1, (N, LETTERS), generator=generator)
    spaced = F.pad(words, (1, 0), value=ord(" "))
    ends = torch.tensor([T // 2, T])
    rows = rows.clone()
    for end in ends.tolist():
        rows[:, end - LETTERS - 1 : end] = spaced
    rows[:, T // 2] = ord(" ")
    return rows, ends[:, None] + torch.arange(KNOWN - LETTERS, 0)


@torch.no_grad()
def saved_on_made_up_words(model: Any, rows: Tensor, letters: Tensor) -> float:
    """Mean bits of the letters of the first occurrence minus that of the second; arguments of `made_up_word_rows`."""
    rows = rows.to(next(model.parameters()).device)
    logits = model.eval()(input_ids=rows).logits[:, :-1].float()
    nats = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    first, second = (float(nats[:, places - 1].mean()) for places in letters)
    return (first - second) / math.log(2)


def key_value_rows(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """N rows of key-value pairs, and then their keys in another order, each followed by its value.

    Keys are small letters, each at most once in a row; values are capital letters. The length T of a row is a multiple
    of 4 of at most 104.

    Returns:
        Tokens [N, T]; and labels [N, T], of the values in the second half alone.
    """
    K = length // 4

    def permutations(size: int) -> Tensor:
        return torch.rand(count, size, generator=generator).argsort(1)

    keys = ord("a") + permutations(26)[:, :K]
    pairs = torch.stack([keys, torch.randint(ord("A"), ord("Z") + 1, (count, K), generator=generator)], dim=-1)
    asked = pairs.gather(1, permutations(K)[..., None].expand(-1, -1, 2))
    tokens = torch.cat([pairs, asked], dim=1).flatten(1)
    labels = tokens.clone()
    labels[:, : 2 * K] = labels[:, ::2] = IGNORED_LABEL
    return tokens, labels


def recalled_pairs(model: Any, shape: Shape, *, learning_rate: float, steps: int, seed: int) -> float:
    """Train on key-value pairs, and return the share of values recalled on new rows.

    A row has an eighth of the bytes of a block, and a step four times as many rows. To name any value of a row of P
    pairs is right once in P times.
    """
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    optimizer, schedule = adamw_with_linear_decay(model, learning_rate, steps)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        tokens, labels = key_value_rows(count, shape.block // 8, generator)
        return tokens.to(device), labels.to(device)

    def loss(step: int) -> Tensor:
        tokens, labels = draw(4 * shape.batch)
        value: Tensor = model(input_ids=tokens, labels=labels).loss
        return value

    fit(loss, optimizer, steps, model=model, schedule=schedule)
    tokens, labels = draw(SCORED_PAIRS)
    with torch.no_grad():
        named = model.eval()(input_ids=tokens).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != IGNORED_LABEL
    return float((named == labels[:, 1:])[asked].float().mean())
