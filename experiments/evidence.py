"""The comparisons in the README: a table between two markers, and a forest plot of the same numbers.

Both are written by `python -m experiments report` from the stored runs of `confirmation`, `rivals` and `calibrate`.
RSA is compared with the plain model and with its best rival on a text: differences of scores, RSA minus the other,
lower is better. Which are better or worse is decided for the whole table together (Holm's correction, 5 %).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import calibrate, confirmation, rivals
from experiments.calibrate.arms import CALIBRATED, FACTORS_ON_ROWS, IA3_ON_ROWS, LORA_ON_ROWS, PLAIN, TOKEN_BIAS
from experiments.calibrate.training import NOTHING
from experiments.runner.experiment import Experiment, Size
from experiments.runner.panels import COLOURS, panels
from experiments.runner.rate_search import finished_runs
from experiments.runner.runner import FOLDER, read_runs
from experiments.runner.summary import Row, Rows, Settings
from experiments.variants import CONVOLUTION, DEFAULT, NO_RECURRENCE

FIGURE = Path("results") / "evidence.png"
BEGIN, END = "<!-- evidence: written by `python -m experiments report` -->", "<!-- end of evidence -->"
NAMES = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "transformer-xl": "Transformer-XL",
    "smollm2": "SmolLM2-135M-Instruct, 4 bits",
}
RIVALS_OF_CALIBRATED = {
    NO_RECURRENCE: "its gates with P = 0",
    TOKEN_BIAS: "a token bias",
    FACTORS_ON_ROWS: "two factors a head, on the same rows",
    IA3_ON_ROWS: "IA³ on the same rows",
    LORA_ON_ROWS: "LoRA of rank 1 on the same rows",
}
TEXTS = {"wikitext-2": "WikiText-2", "python": "Python", "c": "C"}


@dataclass(frozen=True)
class Effect:
    """RSA against a rival."""

    rival: str
    row: Row  # score of RSA − score of the rival
    score: float  # of the rival, the mean over the seeds

    @property
    def change(self) -> Row:
        """The difference in percent of the rival's score."""
        return self.row.scaled(100 / self.score)


@dataclass(frozen=True)
class Entry:
    """A model on a text: RSA against the plain model, and against the best of the rivals that have run there."""

    model: str
    text: str
    unit: str
    effects: tuple[Effect, Effect]  # in this order


def find_entries(root: Path) -> list[Entry]:
    """The rows of the table from the runs that are stored below a folder."""
    of_rivals = _rows(rivals.EXPERIMENT, "full", root) or _rows(rivals.EXPERIMENT, "quick", root)
    confirmed, calibrated = (_rows(each.EXPERIMENT, "full", root) for each in (confirmation, calibrate))
    return [*_confirmed(confirmed), *_over_rivals(of_rivals), *_calibrated(calibrated)]


def _rows(experiment: Experiment, size: Size, root: Path) -> Rows:
    grid = experiment.keyed_grid(size, experiment.seeds[size])
    runs = finished_runs(grid, read_runs(root / FOLDER / experiment.name / size), experiment.search_by)
    return experiment.summarise(runs) if runs else Rows()


def _confirmed(rows: Rows) -> Iterator[Entry]:
    for over_plain in rows.find(confirmation.OVER_PLAIN, arm=DEFAULT):
        case = over_plain.pick(confirmation.GROUP)
        over_convolution = rows.find(confirmation.OVER_CONVOLUTION, **case, arm=DEFAULT)[0]
        yield _from_scratch(rows, case, {"plain": over_plain, CONVOLUTION: over_convolution})


def _over_rivals(rows: Rows) -> Iterator[Entry]:
    """The best rival is the one with the best score of the validation text."""
    for of_rsa in rows.find(confirmation.TEST, arm=DEFAULT):
        case = of_rsa.pick(confirmation.GROUP)
        behind = [rivals.best_rival(rows, case, arms) for arms in (("plain",), rivals.RIVALS[1:])]
        yield _from_scratch(rows, case, {row.settings["arm"]: row.scaled(-1) for row in behind})


def _from_scratch(rows: Rows, case: Settings, over: Mapping[str, Row]) -> Entry:
    model, _, size = case["model"].partition(" of ")
    part, _, corpus = case["text"].rpartition(confirmation.PART_OF)
    text = TEXTS.get(corpus, corpus)
    text = f"{part} MB of {text}, early stopping" if part else f"{text}, {case['steps']} steps"
    unit = "bits per character" if corpus == "text8" else "bits per byte"
    plain, best = (Effect(arm, row, rows.mean(confirmation.TEST, **case, arm=arm)) for arm, row in over.items())
    return Entry(f"{NAMES[model]}, {size}".removesuffix(", "), text, unit, (plain, best))


def _calibrated(rows: Rows) -> Iterator[Entry]:
    """SmolLM2 with what `calibrate` finds, and nothing else trained; the best rival is the one that gains most."""
    for gain in rows.find(calibrate.GAIN, arm=CALIBRATED, trained=NOTHING, model="smollm2"):
        case = gain.pick(calibrate.GROUP)
        over = {rival: rows.find(f"gain over {rival}", **case, arm=CALIBRATED) for rival in RIVALS_OF_CALIBRATED}
        best = min((rival for rival in over if over[rival]), key=lambda rival: over[rival][0].mean)
        scores = {arm: rows.mean("score", **case, arm=arm) for arm in (PLAIN, best)}
        plain = Effect(PLAIN, gain.scaled(-1), scores[PLAIN])
        of_best = Effect(RIVALS_OF_CALIBRATED[best], over[best][0].scaled(-1), scores[best])
        yield Entry(NAMES["smollm2"], TEXTS[case["task"]], "nats per token", (plain, of_best))


def make_table(entries: Sequence[Entry]) -> str:
    """The entries as a table in Markdown, with a verdict on each effect."""
    lines = ["| model | text | score | RSA − plain | RSA − best rival | best rival |", "|---|---|---|---|---|---|"]
    decided = iter(Rows(effect.row for entry in entries for effect in entry.effects).significant(0))
    for entry in entries:
        cells = [entry.model, entry.text, entry.unit]
        for effect in entry.effects:
            verdict = ("better" if effect.row.mean < 0 else "worse") if next(decided) else "undecided"
            cells.append(f"{effect.row.text('+.3f')} {verdict}")
        lines.append(f"| {' | '.join(cells)} | {effect.rival} |")
    return "\n".join(lines)


def draw(entries: Sequence[Entry], path: Path) -> None:
    """A forest plot: the change of the score in percent with its 95 % interval, against plain and the best rival."""
    with panels(path, 1, height=1.0 + 0.3 * len(entries), width=10) as [axes]:
        for i, label in enumerate(("against the plain model", "against the best rival")):
            rows = [entry.effects[i].change for entry in entries]
            places = [place + 0.3 * i - 0.15 for place in range(len(rows))]
            ends = [[row.mean - row.low for row in rows], [row.high - row.mean for row in rows]]
            means = [row.mean for row in rows]
            axes.errorbar(means, places, xerr=ends, fmt="o", color=COLOURS[i], capsize=3, label=label)
        axes.axvline(0, color="#666666", linewidth=0.8)
        names = [f"{e.model.partition('-135M')[0]}, {e.text} ({e.effects[1].rival})" for e in entries]
        axes.set_yticks(range(len(entries)), names)
        axes.set_ylim(len(entries) - 0.5, -0.5)
        axes.legend()
        axes.set(xlabel="change of the score with RSA, %: lower is better")


def write_evidence(root: Path) -> None:
    """Write the table into the README of a folder, and draw the figure."""
    readme, entries = root / "README.md", find_entries(root)
    if entries and readme.exists():
        before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
        _, marker, after = rest.partition(END)
        if marker:
            readme.write_text(f"{before}{BEGIN}\n{make_table(entries)}\n{END}{after}", encoding="utf-8")
            draw(entries, root / FIGURE)
