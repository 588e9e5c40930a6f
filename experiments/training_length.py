"""Training length: whether RSA still saves tokens when a model is trained for longer, with a decayed learning rate.

The schedule is what practitioners train with: warm-up, constant, linear decay to 0 over the last fifth. One run gives
the final score of every length: it trains at the constant rate, and after four fifths of each length a copy of the
model goes on alone with the decay (Hägele et al., 2024, section 4). Lengths double; in between, the score is
interpolated linearly over the logarithm of the tokens.

After the longest training a model is also trained shortly on rows of key-value pairs, and scored by how many values
it names (multi-query associative recall: Arora et al., 2023, Zoology), which its likelihood alone may not tell.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import chain, cycle, starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_constant_schedule_with_warmup

from experiments.byte_models import SHAPES, Curve, Shape, bits_per_byte, build
from experiments.corpora import read_corpus, training_blocks
from experiments.runner.comparison import Column, Comparison, compared, difference, measured
from experiments.runner.experiment import Experiment, Size, combinations
from experiments.runner.fit import adamw, adamw_with_linear_decay, batch_loss, count_parameters, default_device, fit
from experiments.runner.panels import COLOURS, panels
from experiments.runner.summary import Conclusion, Rows, Run, Settings, Values, worst_if_nan
from experiments.variants import make_variant
from rsa_hf.tasks.language_modeling import PreparedText
from rsa_hf.tasks.text_blocks import IGNORED_LABEL

CONSTANT = 0.8  # share of a length before the decay
ALL = 10**9  # bytes: more than any text has
FAMILIES = ("gpt2", "llama")
ARMS = ("plain", "rsa")
GROUP = ("corpus", "model", "family", "longest")
# corpus, model, longest training in tokens a parameter, number of lengths, learning rates, bytes to score, steps of
# training on key-value pairs.
Plan = tuple[str, str, float, int, tuple[float, ...], int, int]
PLANS: dict[Size, list[Plan]] = {
    "toy": [("python", "0.03M", 0.25, 3, (1e-2,), 4_000, 3)],
    "quick": [("wikitext-2", "0.03M", 12.8, 6, (1e-2,), 20_000, 300)],
    "full": [
        ("wikitext-2", "0.1M", 102.4, 9, (1e-3, 2e-3, 4e-3), 40_000, 1000),
        ("wikitext-2", "1M", 25.6, 8, (1e-3, 3e-3), 40_000, 1000),
    ],
}


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Models and their longest training × families × variants × learning rates × seeds."""
    names = ("corpus", "model", "longest", "lengths", "eval_bytes", "recall_steps")
    return [
        {**dict(zip(names, (corpus, model, longest, lengths, *scores), strict=True)), **each}
        for corpus, model, longest, lengths, rates, *scores in PLANS[size]
        for each in combinations(family=FAMILIES, arm=ARMS, learning_rate=rates, seed=range(seeds))
    ]


def measure(settings: Settings) -> Values:
    """The final score of each length, and the share of key-value pairs recalled after the last."""
    shape, family, seed = SHAPES[settings["model"]], settings["family"], settings["seed"]
    text = read_corpus(settings["corpus"], ALL, settings["eval_bytes"], shape.block)
    torch.manual_seed(seed)
    plain = build(family, shape)
    parameters = count_parameters(plain)
    longest = settings["longest"] * parameters / (shape.batch * shape.block)
    steps = [max(2, round(longest / 2**k)) for k in reversed(range(settings["lengths"]))]
    model: Any = make_variant(settings["arm"], plain, shape.block).to(default_device())
    rate = settings["learning_rate"]
    scores, trained = train_lengths(model, text, shape, steps, learning_rate=rate, seed=seed)
    return {
        RECALLED: recalled_pairs(trained, shape, learning_rate=rate, steps=settings["recall_steps"], seed=seed),
        "final": scores[-1],
        "tokens": [float(n * shape.batch * shape.block) for n in steps],
        "tokens per parameter": [n * shape.batch * shape.block / parameters for n in steps],
        "bits per byte": scores,
    }


def train_lengths(
    model: Any, text: PreparedText, shape: Shape, lengths: Sequence[int], *, learning_rate: float, seed: int
) -> tuple[list[float], Any]:
    """Train for several lengths, in rising steps; returns their final bits per byte, and the model after the last.

    The warm-up takes a twentieth of the shortest length. `seed` shuffles the blocks.
    """
    blocks = training_blocks(text)
    optimizer = adamw(model, learning_rate)
    schedule = get_constant_schedule_with_warmup(optimizer, max(1, lengths[0] // 20))
    ends = {round(CONSTANT * length): length for length in lengths}
    scores: list[float] = []
    branch = model

    def decay(step: int, _: Tensor) -> None:
        nonlocal branch
        if step not in ends:
            return
        branch, steps = copy.deepcopy(model), ends[step] - step
        of_branch = adamw(branch, learning_rate)
        of_branch.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        falling = LambdaLR(of_branch, lambda taken: 1 - taken / steps)
        fit(batch_loss(branch, blocks, shape.batch, seed, skip=step), of_branch, steps, model=branch, schedule=falling)
        scores.append(bits_per_byte(branch, text.validation))

    loss = batch_loss(model, blocks, shape.batch, seed)
    fit(loss, optimizer, max(ends), model=model, schedule=schedule, after_step=decay)
    return scores, branch


# --- recall -------------------------------------------------------------------------------------------------------

SCORED_ROWS = 256


def key_value_rows(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """N rows of key-value pairs, and then their keys in another order, each followed by its value.

    Keys are small letters, each at most once in a row; values are capital letters. T is a multiple of 4, at most 104.
    Returns tokens [N, T], and labels [N, T] of the values in the second half alone.
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
    """Train on key-value pairs, in place, and return the share of values recalled on new rows.

    A row has an eighth of the bytes of a block, and a step four times as many rows.
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
    tokens, labels = draw(SCORED_ROWS)
    with torch.no_grad():
        named = model.eval()(input_ids=tokens).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != IGNORED_LABEL
    return float((named == labels[:, 1:])[asked].float().mean())


# --- results ------------------------------------------------------------------------------------------------------

LENGTH = "tokens per parameter"
RATIO, SAVED = "tokens / plain", "bits per byte below plain"
RECALLED = "key-value pairs recalled"  # after the longest training
MORE_RECALLED = f"{RECALLED}, rsa − plain"


def _token_ratio(run: Run, plain: Run, length: int) -> float:
    """Tokens to the plain model's score at the end of a length, over that length.

    It is too high where the shortest training reaches that score already. Where none does, it is the longest training
    over the tokens that the plain model needs for the score at its end.
    """
    curve, of_plain = (
        Curve([*map(math.log, each.values["tokens"])], [*map(worst_if_nan, each.values["bits per byte"])])
        for each in (run, plain)
    )
    reached = curve.tokens_until(of_plain.bits_per_byte[length])
    if math.isfinite(reached):
        return math.exp(reached - of_plain.tokens[length])
    return math.exp(curve.tokens[-1] - of_plain.tokens_until(curve.bits_per_byte[-1]))


def _at(length: int, is_longest: bool) -> dict[str, Column]:
    """The columns at the end of a length, by its place; after the longest, also what is recalled."""

    def score(run: Run) -> float:
        return float(run.values["bits per byte"][length])

    return {
        "bits per byte": lambda case, arm: [*map(score, case.runs[arm])],
        "learning rate": measured("learning_rate"),
        RATIO: compared({"rsa"}, "plain", lambda run, plain: _token_ratio(run, plain, length)),
        SAVED: compared({"rsa"}, "plain", lambda run, plain: score(plain) - worst_if_nan(score(run))),
    } | ({RECALLED: measured(RECALLED), MORE_RECALLED: difference({"rsa"}, "plain", RECALLED)} if is_longest else {})


COMPARISON = Comparison(GROUP, ARMS, lambda run: float(run.values["final"]), {})


def summarise(runs: Sequence[Run]) -> Rows:
    """Rows for each variant and length."""
    rows = Rows()
    for case in COMPARISON.cases(runs):
        lengths = case.runs["plain"][0].values[LENGTH]
        for arm in ARMS:
            for i, tokens in enumerate(lengths):
                rows += case.rows(arm, _at(i, i == len(lengths) - 1), **{LENGTH: tokens})
    return rows


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if RSA needs fewer tokens than the plain model for the score of its longest training."""
    cases = _by_case(rows)
    longest = Rows(ratios[-1] for ratios, _ in cases)
    ends = "; ".join(f"{_model(row.settings)} {row.text('.2f')}" for row in longest)
    sentence = (
        f"Tokens that RSA needs for the plain model's final score, as a share of the plain model's: {ends}. They are "
        f"significantly fewer in {longest.wins(1)} cases."
    )
    findings = [*starmap(_finding, cases), *(_recall_finding(rows, row.settings) for row in longest)]
    answer = f"share of the plain model's tokens after the longest training: {longest.spans('family', '.2f')}"
    return Conclusion(longest.judge(1), answer, sentence + longest.undecided(1), tuple(findings))


def _by_case(rows: Rows) -> list[tuple[Rows, Rows]]:
    """For each case the ratios and the savings by length."""
    cases = dict.fromkeys(tuple(row.pick(GROUP).items()) for row in rows)
    return [(rows.find(RATIO, **dict(case)), rows.find(SAVED, **dict(case))) for case in cases]


def _finding(ratios: Rows, savings: Rows) -> str:
    settings = ratios[0].settings
    parts = [
        f"{ratio.settings[LENGTH]:.3g}: {ratio.text('.2f')} of the tokens, {saved.mean:+.3f} bits per byte saved"
        for ratio, saved in zip(ratios, savings, strict=True)
    ]
    return f"{settings['family']} of {settings['model']}, by tokens per parameter: {'; '.join(parts)}"


def _recall_finding(rows: Rows, settings: Settings) -> str:
    """What a case recalls after its longest training."""
    plain, rsa = (rows.mean(RECALLED, **{**settings, "arm": arm}) for arm in ARMS)
    [more] = rows.find(MORE_RECALLED, **settings)
    return f"{_model(settings)}, {RECALLED}: plain {plain:.3f}, rsa {rsa:.3f}, {more.text('+.3f')}"


def _model(settings: Settings) -> str:
    return f"{settings['family']} of {settings['model']} at {settings[LENGTH]:.3g} tokens per parameter"


def draw(runs: Sequence[Run], path: Path) -> None:
    """For each case the share of the tokens, and the bits per byte saved."""
    cases = _by_case(summarise(runs))
    labels = ("tokens to plain's score, RSA / plain", "bits per byte, plain − RSA")
    with panels(path, 2 * len(cases), columns=2) as grid:
        for axes, found, label in zip(grid, chain(*cases), cycle(labels), strict=False):
            title = "{family} of {model}, {corpus}".format(**found[0].settings)
            title += f"\nmean and 95 % interval, {found[0].seeds} seeds"
            lengths, means = [row.settings[LENGTH] for row in found], [row.mean for row in found]
            axes.errorbar(lengths, means, yerr=found.error_bars(), fmt="o-", capsize=3, color=COLOURS[0])
            axes.set(title=title, xscale="log", xlabel="training length, tokens per parameter", ylabel=label)
            if found[0].measure == RATIO:
                axes.axhline(1, color="#666666", linewidth=0.8)


EXPERIMENT = Experiment(
    name="training-length",
    claim="The tokens that RSA saves do not go away when a model is trained for longer, with a learning rate that "
    "decays at the end.",
    published="None: the paper trains each model for one length.",
    remark="The variant rsa is not RSAConfig.from_scratch of today, see experiments/variants.py. The best learning "
    "rate is that of the longest training. Where RSA's shortest training is better than plain already, its share of "
    "the tokens is an upper limit; where its longest is worse than plain, its share is above 1: its tokens over "
    "those that plain needs for RSA's final score. Key-value pairs are recalled after the longest training and a "
    "short one on such pairs; that is not part of the verdict.",
    seeds={"toy": 2, "quick": 3, "full": 4},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=draw,
    summarise=summarise,
    parts=("model", "longest", "family", "arm"),
    search_by=COMPARISON.score,
    needs_gpu=lambda settings: settings["model"] == "1M",
)
