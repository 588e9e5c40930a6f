"""The comparisons of README: a table between two markers, and a forest plot of the same numbers.

Both are written by `python -m experiments report` from the stored runs of `confirmation`, `rivals` and `calibrate`. An
effect is a difference of scores, RSA minus a rival, lower is better. Which effects are better or worse is decided for
all of the table together (Holm's correction, 5 %).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import calibrate, confirmation, rivals
from experiments.calibrate.arms import CALIBRATED, CALIBRATED_BIAS, IA3_ON_ROWS, LORA_ON_ROWS, PLAIN, TOKEN_BIAS
from experiments.calibrate.training import NOTHING
from experiments.runner.experiment import Experiment, Size
from experiments.runner.panels import COLOURS, panels
from experiments.runner.rate_search import finished_runs
from experiments.runner.runner import FOLDER, read_runs
from experiments.runner.summary import Row, Rows
from experiments.variants import CONVOLUTION, DEFAULT, NO_RECURRENCE

FIGURE = Path("results") / "evidence.png"
BEGIN, END = "<!-- evidence: written by `python -m experiments report` -->", "<!-- end of evidence -->"
NAMES = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "transformer-xl": "Transformer-XL",
    "smollm2": "SmolLM2-135M-Instruct, 4 bits",
}
TEXTS = {"wikitext-2": "WikiText-2", "python": "Python", "c": "C"}


@dataclass(frozen=True)
class Effect:
    """RSA against a rival on one model and text."""

    model: str
    text: str
    rival: str
    row: Row  # score of RSA − score of the rival
    score: float  # of the rival, the mean over the seeds
    unit: str

    @property
    def change(self) -> Row:
        """The difference in percent of the rival's score."""
        return self.row.scaled(100 / self.score)


def find_effects(root: Path) -> list[Effect]:
    """The effects of the runs that are stored below a folder, in the order of the table."""
    return [*_confirmed(_rows(confirmation.EXPERIMENT, "full", root)), *_over_rivals(root), *_calibrated(root)]


def _rows(experiment: Experiment, size: Size, root: Path) -> Rows:
    grid = experiment.keyed_grid(size, experiment.seeds[size])
    runs = finished_runs(grid, read_runs(root / FOLDER / experiment.name / size), experiment.search_by)
    return experiment.summarise(runs) if runs else Rows()


def _confirmed(rows: Rows) -> Iterator[Effect]:
    for measure, rival in ((confirmation.OVER_PLAIN, "plain"), (confirmation.OVER_CONVOLUTION, CONVOLUTION)):
        for row in rows.find(measure, arm=DEFAULT):
            yield _from_scratch(rows, row, rival)


def _over_rivals(root: Path) -> Iterator[Effect]:
    """The plain model, and the best of the rivals that have run, by the validation text."""
    rows = _rows(rivals.EXPERIMENT, "full", root) or _rows(rivals.EXPERIMENT, "quick", root)
    for of_rsa in rows.find(confirmation.TEST, arm=DEFAULT):
        case = of_rsa.pick(confirmation.GROUP)
        for arms in (("plain",), rivals.RIVALS[1:]):
            behind = rivals.best_rival(rows, case, arms)
            yield _from_scratch(rows, behind.scaled(-1), behind.settings["arm"])


def _from_scratch(rows: Rows, row: Row, rival: str) -> Effect:
    case = row.pick(confirmation.GROUP)
    model, _, size = case["model"].partition(" of ")
    part, _, corpus = case["text"].rpartition(confirmation.PART_OF)
    text = TEXTS.get(corpus, corpus)
    text = f"{part} MB of {text}, early stopping" if part else f"{text}, {case['steps']} steps"
    unit = "bits per character" if corpus == "text8" else "bits per byte"
    name = f"{NAMES[model]}, {size}".removesuffix(", ")
    return Effect(name, text, rival, row, rows.mean(confirmation.TEST, **case, arm=rival), unit)


def _calibrated(root: Path) -> Iterator[Effect]:
    """Pretrained models with what `calibrate` finds, and nothing trained."""
    rows = _rows(calibrate.EXPERIMENT, "full", root)
    for arm, measure, against, rival in (
        (CALIBRATED, calibrate.GAIN, PLAIN, "plain"),
        (CALIBRATED, f"gain over {NO_RECURRENCE}", NO_RECURRENCE, "its gates with P = 0"),
        (CALIBRATED, f"gain over {TOKEN_BIAS}", TOKEN_BIAS, "plain with a token bias"),
        (CALIBRATED_BIAS, f"gain over {TOKEN_BIAS}", TOKEN_BIAS, "plain, both with a token bias"),
        (CALIBRATED, f"gain over {IA3_ON_ROWS}", IA3_ON_ROWS, "IA³ trained on the same rows"),
        (CALIBRATED, f"gain over {LORA_ON_ROWS}", LORA_ON_ROWS, "LoRA of rank 1 trained on the same rows"),
    ):
        for row in rows.find(measure, arm=arm, trained=NOTHING, model="smollm2"):
            score = rows.mean("score", **row.pick(calibrate.GROUP), arm=against)
            text = TEXTS[row.settings["task"]]
            yield Effect(NAMES["smollm2"], text, rival, row.scaled(-1), score, "nats per token")


def verdicts(effects: Sequence[Effect]) -> list[str]:
    """For each effect `better`, `worse` or `undecided`."""
    rows = Rows(effect.row for effect in effects)
    return [
        ("better" if row.mean < 0 else "worse") if differs else "undecided"
        for row, differs in zip(rows, rows.significant(0), strict=True)
    ]


def make_table(effects: Sequence[Effect]) -> str:
    """The effects as a table in Markdown."""
    lines = ["| model | text | RSA against | difference, lower is better | |", "|---|---|---|---|---|"]
    for effect, verdict in zip(effects, verdicts(effects), strict=True):
        difference = f"{effect.row.text('+.3f')} {effect.unit}"
        lines.append(f"| {effect.model} | {effect.text} | {effect.rival} | {difference} | {verdict} |")
    return "\n".join(lines)


def draw(effects: Sequence[Effect], path: Path) -> None:
    """A forest plot: the change of the score in percent, with its 95 % interval; against plain, and against others."""
    rows = [effect.change for effect in effects]
    with panels(path, 1, height=0.6 + 0.22 * len(rows), width=10) as [axes]:
        for place, (effect, row) in enumerate(zip(effects, rows, strict=True)):
            colour = COLOURS[effect.rival != "plain"]
            axes.errorbar(
                row.mean, place, xerr=[[row.mean - row.low], [row.high - row.mean]], fmt="o", color=colour, capsize=3
            )
        axes.axvline(0, color="#666666", linewidth=0.8)
        names = [f"{e.model.partition('-135M')[0]}, {e.text}: against {e.rival}" for e in effects]
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set(xlabel="change of the score with RSA, %: lower is better")


def write_evidence(root: Path) -> None:
    """Write the table into the README of a folder, and draw the figure."""
    readme, effects = root / "README.md", find_effects(root)
    if effects and readme.exists():
        before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
        _, marker, after = rest.partition(END)
        if marker:
            readme.write_text(f"{before}{BEGIN}\n{make_table(effects)}\n{END}{after}", encoding="utf-8")
            draw(effects, root / FIGURE)
