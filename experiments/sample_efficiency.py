"""Sample efficiency: tokens that a model needs to reach the unpatched model's final bits per byte.

Every variant is trained at every learning rate with the first seed, and at its best rate with the other seeds. The
target of a seed is the plain model's score with that seed at the end of training; and, to see how the ratio develops
with longer training, its score after half of its tokens. The plain model's own tokens are counted until it first
reached the target: on a text that is read many times it gets worse again, and an equal model would look better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import variants
from experiments.byte_models import SHAPES, Curve, build, train_on_bytes
from experiments.corpora import read_corpus
from experiments.runner.comparison import Case, Comparison, draw_arms
from experiments.runner.experiment import Experiment, Size, combinations
from experiments.runner.fit import count_parameters, default_device, step_time_ratio
from experiments.runner.panels import COLOURS, panels
from experiments.runner.summary import Conclusion, Row, Rows, Run, Settings, Values, interval, weakest
from experiments.variants import NO_RECURRENCE, VARIANTS, make_variant

GOALS = {"gpt2": 0.2, "llama": 0.4}  # this project's aim, as a share of the plain model's tokens
TIME = "time of a step / plain"
RATIO, RATIO_HALF_WAY, RATIO_OF_TIME = "tokens / plain", "tokens / plain, half way", "wall-clock / plain"
MISSING = "bits per byte above the target, with the goal's tokens"
OVER_NO_RECURRENCE, OVER_RSA = f"bits per byte, rsa − {NO_RECURRENCE}", "bits per byte, variant − rsa"
AT_THE_EDGE = "best rate is the least or largest of three or more"
READ = "times the text is read"
OTHERS = tuple(variant for variant in VARIANTS if variant not in ("plain", "rsa"))
OF_FAMILY = {"gpt2": ("plain", "rsa", "published", NO_RECURRENCE, variants.PACE), "llama": VARIANTS}
_CLAIM = ("plain", "rsa")
_SMALL = ("enwik8", 1_000_000, "0.1M", 200)
# Of the variants beyond RSA, those that need more tokens than RSA at 0.1M, and the control of one that needs as many.
_ONLY_SMALL = (variants.HALF, variants.DILATED, "two rems", "channel gates")
# Text, bytes of training text, model, steps, variants.
TEXTS: dict[Size, list[tuple[str, int, str, int, Sequence[str]]]] = {
    "toy": [("python", 100_000, "0.03M", 60, [name for name in VARIANTS if name not in variants.RETIRED])],
    "quick": [(*_SMALL, (*_CLAIM, NO_RECURRENCE))],
    "full": [
        ("enwik8", 1_000_000, "1M", 400, [name for name in VARIANTS if name not in _ONLY_SMALL]),
        ("wikitext-2", 10_000_000, "1M", 400, _CLAIM),
        ("python", 10_000_000, "1M", 400, _CLAIM),
        ("enwik8", 3_700_000, "10M", 1000, _CLAIM),
        (*_SMALL, [name for name in VARIANTS if name not in ("published", "learned toeplitz")]),
    ],
}
# Number of evaluations, and bytes to score.
EVALUATIONS = {"0.03M": (6, 4_000), "0.1M": (10, 10_000), "1M": (20, 20_000), "10M": (20, 20_000)}
# Those of 1M are around the best rates of the plain model and RSA on enwik8.
_LARGE_RATES: dict[str, tuple[float, ...]] = {"gpt2": (1e-3, 3e-3, 1e-2), "llama": (3e-4, 1e-3, 3e-3)}
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "0.03M": dict.fromkeys(GOALS, (3e-3, 1e-2)),
    "0.1M": dict.fromkeys(GOALS, (2e-3, 4e-3)),
    "1M": _LARGE_RATES,
    "10M": _LARGE_RATES,
}
GROUP = ("corpus", "train_bytes", "model", "family", "steps")


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Texts and models × seeds × families × variants × learning rates."""
    return [
        {"corpus": corpus, "train_bytes": train_bytes, "model": model, "steps": steps, "family": family, **each}
        for corpus, train_bytes, model, steps, arms in TEXTS[size]
        for seed in range(seeds)
        for family in GOALS
        for each in combinations(
            evaluations=[EVALUATIONS[model][0]],
            eval_bytes=[EVALUATIONS[model][1]],
            arm=[name for name in arms if name in OF_FAMILY[family]],
            learning_rate=RATES[model][family],
            seed=[seed],
        )
    ]


def measure(settings: Settings) -> Values:
    """The learning curve, and the time of a step relative to the plain model."""
    shape, family, arm, seed = SHAPES[settings["model"]], settings["family"], settings["arm"], settings["seed"]
    text = read_corpus(settings["corpus"], settings["train_bytes"], settings["eval_bytes"], shape.block)
    plan = {name: settings[name] for name in ("learning_rate", "steps", "evaluations")}

    torch.manual_seed(seed)
    model: Any = make_variant(arm, build(family, shape), shape.block).to(default_device())
    curve = train_on_bytes(model, text, shape, **plan, seed=seed)
    values: Values = {
        "final": curve.bits_per_byte[-1],
        "parameters": float(count_parameters(model)),
        "tokens": curve.tokens,
        "bits per byte": curve.bits_per_byte,
    }
    if arm != "plain":
        plain: Any = build(family, shape)
        block = torch.arange(shape.batch * shape.block, device=default_device()).view(shape.batch, -1).remainder(256)
        values[TIME] = step_time_ratio(model, plain.to(default_device()), block)
    return values


def _curve(run: Run) -> Curve:
    return Curve(run.values["tokens"], run.values["bits per byte"])


def _token_ratio(run: Run, plain: Run, share: float = 1.0) -> float:
    """Tokens to the plain model's score after this share of its training, over the plain model's own."""
    of_plain = _curve(plain)
    target = of_plain.bits_per_byte[max(1, round(share * len(of_plain.tokens))) - 1]
    return _curve(run).tokens_until(target) / of_plain.tokens_until(target)


def _missing(run: Run, plain: Run) -> float:
    """Bits per byte above the plain model's last score, after the goal's share of the plain model's tokens."""
    of_plain, goal = _curve(plain), GOALS[run.settings["family"]]
    target = of_plain.bits_per_byte[-1]
    return _curve(run).score_at(goal * of_plain.tokens_until(target)) - target


def make_columns(case: Case, arm: str) -> dict[str, list[float]]:
    """Scores of a variant, and its tokens relative to the plain model's."""
    tried, rates = case.rates[arm], case.values(arm, "learning_rate")
    columns = {
        "bits per byte": case.values(arm, "final"),
        "learning rate": rates,
        AT_THE_EDGE: [float(len(tried) > 2 and rate in (min(tried), max(tried))) for rate in rates],
        READ: [run.values["tokens"][-1] / case.settings["train_bytes"] for run in case.runs[arm]],
        "parameters": case.values(arm, "parameters"),
    }
    if arm != "plain":
        columns[TIME] = case.values(arm, TIME)
        # The ratio of a run that never reaches the target is infinite, and so is the mean, without an interval.
        columns[RATIO] = case.compare(arm, "plain", _token_ratio)
        columns[RATIO_HALF_WAY] = case.compare(arm, "plain", lambda run, plain: _token_ratio(run, plain, 0.5))
        columns[MISSING] = case.compare(arm, "plain", _missing)
        columns[RATIO_OF_TIME] = [a * b for a, b in zip(columns[RATIO], columns[TIME], strict=True)]
    if arm == "rsa" and NO_RECURRENCE in case.runs:
        columns[OVER_NO_RECURRENCE] = case.differences(arm, NO_RECURRENCE, "final")
    if arm in variants.BEYOND_RSA:
        columns[OVER_RSA] = case.differences(arm, "rsa", "final")
    return columns


COMPARISON = Comparison(GROUP, ("plain", "rsa"), lambda run: float(run.values["final"]), make_columns)


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if RSA needs fewer tokens than the plain model and ends better than without recurrence."""
    ratios, by_recurrence = rows.find(RATIO, arm="rsa"), rows.find(OVER_NO_RECURRENCE)
    fewer, met = ratios.below(1), sum(_goal_is_met(row) for row in ratios)
    sentence = (
        f"RSA needs significantly fewer tokens than the plain model in {fewer} of {len(ratios)} settings; the "
        f"goals, {' and '.join(f'{goal} for {family}' for family, goal in GOALS.items())}, are met in {met}."
    )
    if by_recurrence:
        better = f"{by_recurrence.below(0)} of {len(by_recurrence)}"
        sentence += f" It ends significantly better than without recurrence in {better}."
    if missing := len(ratios) - len(by_recurrence):
        sentence += f" The variant without recurrence has not run in {missing}: there the verdict is on tokens alone."
    verdict = weakest(ratios.judge(1), by_recurrence.judge(0))  # without comparisons, the second is "confirmed"
    times = rows.find(RATIO_OF_TIME, arm="rsa").by("family")
    answer = "share of the plain model's tokens: " + ", ".join(
        f"{family} {of_tokens.span('.2f')} ({times[family].span('.2f')} of its time)"
        for family, of_tokens in ratios.by("family").items()
    )
    findings = tuple(_finding(rows, row) for row in ratios)
    return Conclusion(verdict, answer, sentence + ratios.undecided(1), findings)


def _goal_is_met(ratio: Row) -> bool:
    return ratio.mean <= GOALS[ratio.settings["family"]]


def _finding(rows: Rows, ratio: Row) -> str:
    """The comparisons of one model on one text."""
    family, group = ratio.settings["family"], {name: ratio.settings[name] for name in GROUP}

    def rsa(measure: str) -> float:
        return rows.mean(measure, **ratio.settings)

    text = (
        f"{family} of {group['model']}, {group['train_bytes']:,} bytes of {group['corpus']}, read {rsa(READ):.2g} "
        f"times: {_ratio_text(ratio)} of the plain model's tokens and {rsa(RATIO_OF_TIME):.2f} of its time; goal "
        f"{GOALS[family]} {'met' if _goal_is_met(ratio) else 'not met'}: after that share of the tokens "
        f"{rsa(MISSING):+.3f} bits per byte relative to the plain model's final score; {rsa(RATIO_HALF_WAY):.2f} of "
        "the tokens to the plain model's score half way"
    )
    if others := [each for name in OTHERS for each in rows.find(RATIO, arm=name, **group)]:
        listed = ", ".join(f"{each.settings['arm']} {_ratio_text(each)}" for each in others)
        text += f"; tokens of other variants: {listed}"
    if beyond := [f"{each.settings['arm']} {each.text('+.3f')}" for each in rows.find(OVER_RSA, **group)]:
        text += f"; bits per byte relative to RSA: {', '.join(beyond)}"
    for each in rows.find(OVER_NO_RECURRENCE, **group):
        text += f"; RSA ends {each.mean:+.3f} bits per byte relative to no recurrence"
    edges = [each.settings["arm"] for each in rows.find(AT_THE_EDGE, **group) if each.mean]
    return text + (f"; best at the lowest or highest learning rate tried: {', '.join(edges)}" if edges else "")


def _ratio_text(ratio: Row) -> str:
    return "not reached with every seed" if ratio.mean == math.inf else ratio.text(".2f")


def draw(runs: Sequence[Run], path: Path) -> None:
    """For each model and text the mean learning curves of the claim, and the tokens of every variant."""
    cases = COMPARISON.cases(runs)
    with panels(path, 2 * len(cases), columns=4) as grid:
        for case, left, right in zip(cases, grid[::2], grid[1::2], strict=True):
            shown = [variant for variant in (*_CLAIM, NO_RECURRENCE) if variant in case.runs]
            for variant, colour in zip(shown, COLOURS, strict=False):
                found = case.runs[variant]
                scores = zip(*(run.values["bits per byte"] for run in found), strict=True)
                means, lows, highs = zip(*map(interval, scores), strict=True)
                tokens = [n / 1e6 for n in found[0].values["tokens"]]
                left.plot(tokens, means, label=variant, color=colour)
                left.fill_between(tokens, lows, highs, color=colour, alpha=0.15, linewidth=0)
            seeds = f"mean and 95 % interval, {len(case.runs['plain'])} seeds"
            title = "{family} of {model}, {corpus}".format(**case.settings)
            left.set(title=title, xlabel=f"bytes trained on, millions\n{seeds}")
            left.set_ylabel("bits per byte, validation text")
            left.legend(fontsize="x-small")
            ratios = COMPARISON.summarise([run for found in case.runs.values() for run in found]).find(RATIO)
            draw_arms(right, ratios)
            for place, ratio in enumerate(ratios):
                if ratio.mean == math.inf:
                    right.text(1, place, "not reached", ha="center", va="center", fontsize="x-small")
            right.axvline(1, color="#666666", linewidth=0.8)
            right.set_xlim(left=0)
            right.set(title=title, xlabel=f"tokens to plain's final score / plain's tokens\n{seeds}")


EXPERIMENT = Experiment(
    name="sample-efficiency",
    claim="A model with RSA heads reaches the final bits per byte of the same model without them with fewer tokens. "
    "Their recurrence is the cause: without it (P = 0) they end worse.",
    published="text8, 14 layers, bits per character: learnable Toeplitz P 1.183, REM 1.164 (paper, section 4). The "
    "paper has no ratio of tokens.",
    remark="The variant rsa is RSAConfig.from_scratch, which was chosen on a Llama of 1M and enwik8 with one seed "
    "(results/start.md), so results on enwik8 are not independent of that choice; published is the paper's "
    "initialisation. Learning rates are chosen on the text that is scored, on which no variant is trained. Times are "
    "of the machine that ran a variant, CPU or GPU, with other runs beside it. A GPT-2 with learned positions must "
    "learn that near tokens matter; rotary positions give a Llama much of that from the start, which leaves less to "
    "gain. The other variants take RSA apart: alibi is a preference for near tokens alone; no softmax is P V alone; "
    "no recurrence has P = 0, so its gates only damp attention; learned toeplitz and short convolution start as RSA "
    "and learn a free weight for each lag. Where those do as well as RSA, any short memory beside attention helps. "
    "The last nine go beyond: a start from the gates and rates that a model with another seed has learned in the "
    "same training, whose tokens are not counted; gates and rates that learn as fast as the weights, not faster; half "
    "of the heads with plain attention, half of them dilated by 6, gates that depend on the token and, as many "
    "numbers, on the channel, a second REM for each head, and keys or values with REMs of their own.",
    seeds={"toy": 2, "quick": 5, "full": 5},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=draw,
    summarise=COMPARISON.summarise,
    parts=("corpus", "train_bytes", "model", "family", "arm"),
    search_by=COMPARISON.score,
    needs_gpu=lambda settings: settings["model"] == "10M",
    retired=lambda settings: settings["arm"] in variants.RETIRED,
    revision=3,
)
