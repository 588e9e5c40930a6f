"""Associative recall: how soon a model trained from scratch names the value that a key was paired with.

A row has key-value pairs, and then each key once more at random places between blanks; where a key is repeated, the
model has to name its value (multi-query associative recall: Arora et al., 2023, Zoology). A Llama with two layers can
do it by passing each key on to its value in the first layer, and looking the key up in the second.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from experiments.byte_models import small_llama
from experiments.runner.comparison import Comparison, all_measured, compare_variants, ratio
from experiments.runner.experiment import Size, combinations
from experiments.runner.fit import adamw, default_device, fit
from experiments.runner.summary import Settings, Values
from experiments.variants import CONVOLUTION, DEFAULT, SHIFT, make_variant
from rsa_hf.tasks.text_blocks import IGNORED_LABEL

SYMBOLS, BLANK = 512, 0  # keys are below half of the symbols, values above
HEADS, ROWS, SCORED_ROWS = 4, 32, 256
RECALLED = 0.99  # share of values named right that counts as recall
EVERY = 100  # steps between evaluations
GROUP = ("pairs", "layers", "width", "steps")
RIVALS = (SHIFT, CONVOLUTION)
ARMS = ("plain", *RIVALS, DEFAULT)
SHARE, STEPS, SHARE_OF_STEPS = "values named right", "steps to recall", f"steps to recall / {CONVOLUTION}"
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
# Pairs, layers, width, steps.
TASKS: dict[Size, list[tuple[int, int, int, int]]] = {
    "toy": [(2, 1, 16, 20)],
    "quick": [(4, 2, 64, 1000)],
    "full": [(4, layers, width, 4000) for layers in (1, 2) for width in (64, 128)] + [(16, 2, 64, 4000)],
}


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Tasks and models × variants × learning rates × seeds."""
    return [
        {**dict(zip(GROUP, task, strict=True)), **each}
        for task in TASKS[size]
        for each in combinations(arm=ARMS, learning_rate=RATES, seed=range(seeds))
    ]


def recall_rows(count: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """N rows of P key-value pairs, and then their keys in another order, at random places between blanks.

    Keys occur once among the pairs of a row. A repeated key is at an even place of the last three quarters.

    Returns:
        Tokens [N, 8 P]; and labels [N, 8 P], the value of each repeated key at its own place.
    """

    def choose(most: int) -> Tensor:
        return torch.rand(count, most, generator=generator).argsort(1)[:, :pairs]

    keys = 2 + choose(SYMBOLS // 2 - 2)
    values = torch.randint(SYMBOLS // 2, SYMBOLS, (count, pairs), generator=generator)
    places, order = 2 * pairs + 2 * choose(3 * pairs), choose(pairs)
    tokens = torch.full((count, 8 * pairs), BLANK)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    labels = torch.full_like(tokens, IGNORED_LABEL)
    return tokens.scatter_(1, places, keys.gather(1, order)), labels.scatter_(1, places, values.gather(1, order))


def build(pairs: int, layers: int, width: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    return small_llama(SYMBOLS, 8 * pairs, width, 2 * width, layers, HEADS, tied=False)


def train(model: Any, pairs: int, steps: int, learning_rate: float, seed: int) -> list[float]:
    """Train until the model recalls, at most for so many steps; returns the share named right every 100 steps.

    AdamW; the learning rate warms up over 100 steps and falls to 0 at the end of the given steps, linearly.
    """
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    scored, answers = recall_rows(SCORED_ROWS, pairs, generator)
    optimizer = adamw(model, learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 100) * (1 - s / steps))
    shares: list[float] = []

    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens.to(device), use_cache=False).logits
        return found

    def loss(_: int) -> Tensor:
        tokens, labels = recall_rows(ROWS, pairs, generator)
        return F.cross_entropy(logits(tokens).flatten(0, 1), labels.to(device).flatten(), ignore_index=IGNORED_LABEL)

    def evaluate(step: int, _: Tensor) -> bool:
        if step % EVERY and step < steps:
            return False
        with torch.no_grad():
            named = logits(scored).argmax(-1).cpu()
        shares.append(float((named == answers)[answers != IGNORED_LABEL].float().mean()))
        return shares[-1] >= RECALLED

    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=evaluate)
    return shares


def steps_to_recall(shares: Sequence[float], steps: int) -> float:
    """Steps until 0.99 of the values were named right, infinite if they never were."""
    return float(min(len(shares) * EVERY, steps)) if shares[-1] >= RECALLED else math.inf


def score(shares: Sequence[float], steps: int) -> float:
    """Steps to recall; where a run does not get there, twice all steps, less the share named right at the end."""
    needed = steps_to_recall(shares, steps)
    return needed if math.isfinite(needed) else steps * (2 - shares[-1])


def measure(settings: Settings) -> Values:
    """The share of values named right at the end, and the steps that it took."""
    pairs, steps, seed = settings["pairs"], settings["steps"], settings["seed"]
    torch.manual_seed(seed)
    model: Any = make_variant(settings["arm"], build(pairs, settings["layers"], settings["width"]), 8 * pairs)
    shares = train(model.to(default_device()), pairs, steps, settings["learning_rate"], seed)
    return {SHARE: shares[-1], STEPS: steps_to_recall(shares, steps), "shares": shares}


COMPARISON = Comparison(
    GROUP,
    (DEFAULT, CONVOLUTION),
    lambda run: score(run.values["shares"], run.settings["steps"]),
    {**all_measured(SHARE, STEPS, "learning_rate"), SHARE_OF_STEPS: ratio((DEFAULT, SHIFT), CONVOLUTION, STEPS)},
    judged=(SHARE_OF_STEPS,),
    of_arm=DEFAULT,
    even=1.5,  # times the steps of the convolution
    listed=(SHARE, STEPS),
    shown=SHARE,
    label=SHARE,
    line=1,
)


EXPERIMENT = compare_variants(
    COMPARISON,
    name="recall",
    claim="A model with RSA heads learns associative recall with every seed, in at most 1.5 times the steps that it "
    "takes with a learned convolution over four tokens in their place.",
    published="Nothing on RSA. Arora et al. (2023) find that attention with a short convolution recalls where other "
    "layers of linear cost do not.",
    remark="A Llama from scratch, of four heads; rows of eight times as many tokens as pairs. A run ends when 0.99 of "
    "the values are named right on 256 rows, scored every 100 steps. Learning rates are searched by the steps to "
    "that, from 1e-4 to 0.1, until the best is inside.",
    seeds={"toy": 2, "quick": 3, "full": 5},
    grid=make_grid,
    measure=measure,
    parts=(*GROUP, "arm"),
)
