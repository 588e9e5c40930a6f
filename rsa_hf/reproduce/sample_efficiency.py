"""Sample efficiency: how many tokens a model needs to reach the unpatched model's final bits per byte.

Every arm is trained at every learning rate with the first seed, and at the one that was best for it with the others.
The target of a seed is what the plain model reaches with that seed at the end of its training; and, to see which way
the ratio goes as training gets longer, what it reaches half way, of half of its tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rsa_hf.plots import panels
from rsa_hf.reproduce.arms import ARMS, make_arm
from rsa_hf.reproduce.byte_models import SHAPES, Curve, build, read_corpus, train_on_bytes
from rsa_hf.reproduce.cells import Cell, Result, Setting, Values
from rsa_hf.reproduce.conclusion import Conclusion, judge, undecided
from rsa_hf.reproduce.experiment import Experiment, Size
from rsa_hf.reproduce.step_time import step_time_ratio
from rsa_hf.reproduce.summary import Row, at_best_rate, find_rows, interval

__all__ = ["EXPERIMENT"]

GOALS = {"gpt2": 0.2, "llama": 0.4}  # of the plain model's tokens, what this project aims at
LARGEST = {"enwik8": 3_700_000, "wikitext-2": 10_000_000, "python": 10_000_000}  # bytes that the training text has
TIME = "time of a step / plain"
RATIO, RATIO_HALF_WAY, RATIO_OF_TIME = "tokens / plain", "tokens / plain, half way", "wall-clock / plain"
MISSING = "bits per byte above the target, with the goal's tokens"
OTHERS = tuple(arm for arm in ARMS if arm not in ("plain", "rsa"))
GROUP = ("corpus", "train_bytes", "model", "family", "steps")


def _cells(size: Size, seeds: int) -> list[Cell]:
    evaluations, eval_bytes = (6, 4_000) if size == "toy" else (10, 10_000) if size == "quick" else (20, 20_000)
    arms: dict[str, Sequence[str]] = {"gpt2": ("plain", "rsa", "published"), "llama": ARMS}
    grid: list[tuple[str, int, str, int, tuple[float, ...]]]
    if size == "toy":
        grid = [("python", 100_000, "0.03M", 60, (3e-3, 1e-2))]
    elif size == "quick":
        grid = [("enwik8", 1_000_000, "0.1M", 200, (1e-3, 2e-3))]
        arms = {family: [arm for arm in each if arm != "published"] for family, each in arms.items()}
    else:
        rates = (1e-3, 3e-3, 1e-2)
        grid = [(c, n, "1M", 400, rates) for c, most in LARGEST.items() for n in (1_000_000, 100_000, most)]
        if torch.cuda.is_available():
            rates = (3e-4, 1e-3, 3e-3)
            grid += [(c, most, model, 1000, rates) for c, most in LARGEST.items() for model in ("10M", "30M")]
    return [
        {
            "corpus": corpus,
            "train_bytes": train_bytes,
            "model": model,
            "family": family,
            "steps": steps,
            "evaluations": evaluations,
            "eval_bytes": eval_bytes,
            "arm": arm,
            "learning_rate": rate,
            "seed": seed,
        }
        for corpus, train_bytes, model, steps, rates in grid
        for seed in range(seeds)
        for family in GOALS
        for arm in arms[family]
        for rate in rates
    ]


def _run_cell(cell: Cell) -> Values:
    shape, seed, steps = SHAPES[str(cell["model"])], int(cell["seed"]), int(cell["steps"])
    text = read_corpus(str(cell["corpus"]), int(cell["train_bytes"]), int(cell["eval_bytes"]), shape.block)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_arm(str(cell["arm"]), build(str(cell["family"]), shape), shape.block).to(device)
    rate = float(cell["learning_rate"])
    evaluations = int(cell["evaluations"])
    curve = train_on_bytes(model, text, shape, learning_rate=rate, steps=steps, evaluations=evaluations, seed=seed)
    values: Values = {
        "final": curve.bits_per_byte[-1],
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
        "tokens": curve.tokens,
        "bits per byte": curve.bits_per_byte,
    }
    if cell["arm"] != "plain":
        plain = build(str(cell["family"]), shape).to(device)  # type: ignore[arg-type]
        block = torch.arange(shape.batch * shape.block, device=device).view(shape.batch, -1).remainder(256)
        values[TIME] = step_time_ratio(model, plain, {"input_ids": block, "labels": block})
    return values


def _curve(result: Result) -> Curve:
    tokens, scores = result.values["tokens"], result.values["bits per byte"]
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    return Curve(tokens, scores)


def _ratio(curve: Curve, plain: Curve, share: float) -> float:
    """Tokens until what the plain model has reached after this share of its own, over those."""
    last = max(1, round(share * len(plain.tokens))) - 1
    return curve.tokens_until(plain.bits_per_byte[last]) / plain.tokens[last]


def _score(result: Result) -> float:
    return result.number("final")


def _groups(
    results: Sequence[Result],
) -> Iterator[tuple[dict[str, Setting], dict[str, list[Result]]]]:
    """For each setting that has run without and with RSA, the runs of each arm at its best learning rate."""
    for key, best in at_best_rate(results, GROUP, ("plain", "rsa"), _score).items():
        yield dict(zip(GROUP, key, strict=True)), best


def _summarise(results: Sequence[Result]) -> list[Row]:
    rows = []
    for settings, best in _groups(results):
        plain = best["plain"]
        for arm, runs in best.items():
            measures = {
                "bits per byte": [run.number("final") for run in runs],
                "learning rate": [float(run.cell["learning_rate"]) for run in runs],
                "parameters": [run.number("parameters") for run in runs],
            }
            if arm != "plain":
                measures[TIME] = [run.number(TIME) for run in runs]
                curves = [(_curve(run), _curve(other)) for run, other in zip(runs, plain, strict=True)]
                for measure, share in ((RATIO, 1.0), (RATIO_HALF_WAY, 0.5)):
                    measures[measure] = [_ratio(curve, of_plain, share) for curve, of_plain in curves]
                goal = GOALS[str(settings["family"])]
                measures[MISSING] = [
                    curve.score_at(goal * of_plain.tokens[-1]) - of_plain.bits_per_byte[-1]
                    for curve, of_plain in curves
                ]
                measures[RATIO_OF_TIME] = [
                    ratio * step for ratio, step in zip(measures[RATIO], measures[TIME], strict=True)
                ]
            for measure, values in measures.items():
                # A run that never gets there has no ratio, so its mean has no interval either.
                ends = interval(values) if max(values) < math.inf else (math.inf, math.nan, math.nan)
                rows.append(Row({**settings, "arm": arm}, measure, *ends, len(values)))
    return rows


def _conclude(rows: Sequence[Row]) -> Conclusion:
    ratios = find_rows(rows, RATIO, arm="rsa")
    findings = []
    for row in ratios:
        family = str(row.settings["family"])
        same = {name: row.settings[name] for name in GROUP}
        [half_way], [wall_clock], [missing] = (
            find_rows(rows, name, arm="rsa", **same) for name in (RATIO_HALF_WAY, RATIO_OF_TIME, MISSING)
        )
        ends = "one seed" if math.isnan(row.low) else f"{row.low:.2f} … {row.high:.2f}"
        text = (
            f"{family} of {row.settings['model']}, {row.settings['train_bytes']:,} bytes of {row.settings['corpus']}: "
            f"{row.mean:.2f} ({ends}) of the plain model's tokens and {wall_clock.mean:.2f} of its time; goal "
            f"{GOALS[family]} {'met' if row.mean <= GOALS[family] else 'not met'}, with that share of the tokens "
            f"{missing.mean:+.3f} bits per byte from the plain model's last; "
            f"{half_way.mean:.2f} of the first half of its tokens to reach what that gave"
        )
        others = [each for arm in OTHERS for each in find_rows(rows, RATIO, arm=arm, **same)]
        if others:
            text += "; the others' tokens: " + ", ".join(
                f"{each.settings['arm']} {_in_words(each)}" for each in others
            )
        findings.append(text)
    fewer = sum(row.high < 1 for row in ratios)
    sentence = (
        f"RSA needs fewer tokens than the plain model, beyond the interval, in {fewer} of {len(ratios)} settings; the "
        f"goals, {' and '.join(f'{goal} for {family}' for family, goal in GOALS.items())}, are met in "
        f"{sum(row.mean <= GOALS[str(row.settings['family'])] for row in ratios)}."
    )
    return Conclusion(judge(ratios, 1), sentence + undecided(ratios, 1), tuple(findings))


def _in_words(ratio: Row) -> str:
    return f"{ratio.mean:.2f}" if ratio.mean < math.inf else "not there yet in one seed or more"


def _draw(results: Sequence[Result], path: Path) -> None:
    groups = list(_groups(results))
    with panels(path, len(groups), columns=2) as axes:
        for axis, (settings, best) in zip(axes, groups, strict=True):
            for arm, runs in best.items():
                curves = [_curve(run) for run in runs]
                means = [statistics.fmean(scores) for scores in zip(*(c.bits_per_byte for c in curves), strict=True)]
                axis.plot(curves[0].tokens, means, label=arm)
            axis.set_title(f"{settings['family']}, {settings['model']}, {settings['corpus']}")
            axis.set_xlabel("bytes trained on")
            axis.set_ylabel("bits per byte")
            axis.legend()


EXPERIMENT = Experiment(
    name="sample-efficiency",
    claim="A model with RSA heads reaches the final bits per byte of the same model without them from fewer tokens.",
    published="text8, 14 layers, bits per character: learnable Toeplitz P 1.183, REM 1.164 (paper, section 4); the "
    "paper has no ratio of tokens.",
    remark="A GPT-2 with learned positions has to learn that near tokens matter; rotary positions give a Llama much "
    "of that from the start, so that it leaves less to gain. Other arms take RSA apart: alibi is such a preference "
    "alone, no softmax is P V alone, and learned toeplitz and short convolution begin as RSA does and go on with a "
    "free number for each lag; where they do as well, what helps is a short memory beside attention in any form.",
    seeds={"toy": 2, "quick": 5, "full": 5},
    cells=_cells,
    run_cell=_run_cell,
    conclude=_conclude,
    draw=_draw,
    summarise=_summarise,
    parts=("corpus", "train_bytes", "model", "family", "arm"),
    search_by=_score,
    revision=3,
)
