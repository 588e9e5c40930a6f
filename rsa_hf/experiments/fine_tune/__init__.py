"""Fine-tuning: pretrained models that get RSA heads against the same without, on little and on much data.

Every arm is trained at every learning rate with the first seed, and at the one with the best validation score with the
others, with early stopping; what is compared is the test score. The quick size has a small byte-level Llama that is
trained on enwik8 first; MiniLM and SmolLM2 are of the full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rsa_hf.experiments.fine_tune.arms import ARMS, DEFAULT, make_arm
from rsa_hf.experiments.fine_tune.defects import defect_task
from rsa_hf.experiments.fine_tune.grid import COMPARISONS, DEVIGN
from rsa_hf.experiments.fine_tune.learning import fine_tune
from rsa_hf.experiments.fine_tune.pretrained import load_pretrained
from rsa_hf.experiments.fine_tune.tables import GAIN, SETTING, by_validation, conclude, summarise
from rsa_hf.experiments.fine_tune.texts import text_task
from rsa_hf.experiments.runner.cells import Cell, Result, Values
from rsa_hf.experiments.runner.experiment import Experiment, Meanings, Size
from rsa_hf.experiments.runner.summary import find_rows
from rsa_hf.heads import heads_of
from rsa_hf.plots import COLOURS, panels

__all__ = ["EXPERIMENT"]


def cells(size: Size, seeds: int) -> list[Cell]:
    """Models and tasks × shares × arms × learning rates × seeds."""
    return [
        {
            "model": each.model,
            "task": each.task,
            "share": each.share,
            "arm": arm,
            "learning_rate": rate,
            "steps": each.steps,
            "evaluations": each.evaluations,
            "batch": each.batch,
            "length": each.length,
            "most": each.most,
            "scored": each.scored,
            "layers": each.layers,
            "pretraining_steps": each.pretraining_steps,
            "seed": seed,
        }
        for each in COMPARISONS[size]
        for seed in range(seeds)
        for arm in each.arms
        for rate in each.rates
    ]


def run_cell(cell: Cell) -> Values:
    """Fine-tune one arm. A seed has the same portion of the data, in the same order, for all arms."""
    seed = int(cell["seed"])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, tokenizer = load_pretrained(str(cell["model"]), int(cell["layers"]), int(cell["pretraining_steps"]))
        model = make_arm(str(cell["arm"]), model)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
        data = {name: int(cell[name]) for name in ("most", "scored", "length", "seed")}
        share = float(cell["share"])
        if cell["task"] == DEVIGN:
            task = defect_task(tokenizer, share=share, **data)
        else:
            task = text_task(str(cell["task"]), tokenizer, share=share, **data)
        torch.manual_seed(seed)  # all arms drop out the same
        scores = fine_tune(
            model,
            task,
            learning_rate=float(cell["learning_rate"]),
            steps=int(cell["steps"]),
            batch=int(cell["batch"]),
            evaluations=int(cell["evaluations"]),
            seed=seed,
        )
    gates = [float(heads.rates()["gate"].detach().mean()) for heads in filter(None, map(heads_of, model.modules()))]
    return {
        task.measure: scores.test,
        "before training": scores.start,
        "validation": scores.best_validation,
        "best step": float(scores.best_step),
        **({"gate": sum(gates) / len(gates)} if gates else {}),
        "steps scored": scores.steps,
        "validation scores": scores.validation,
    }


def draw(results: Sequence[Result], path: Path) -> None:
    """A panel for each model, task and share: the gain of each arm over the plain model, with 95 % intervals."""
    rows = find_rows(summarise(results), GAIN)
    settings = list(dict.fromkeys(tuple(row.settings[name] for name in SETTING) for row in rows))
    names = [arm for arm in ARMS if any(row.settings["arm"] == arm for row in rows)]
    with panels(path, len(settings)) as grid:
        for axes, setting in zip(grid, settings, strict=True):
            for row in rows:
                if tuple(row.settings[name] for name in SETTING) != setting:
                    continue
                colour = COLOURS[1] if row.settings["arm"] == DEFAULT else COLOURS[0]
                ends = [[row.mean - row.low], [row.high - row.mean]]
                place = names.index(str(row.settings["arm"]))
                axes.errorbar([row.mean], [place], xerr=ends, fmt="o", capsize=3, color=colour)
            axes.axvline(0, color="#666666", linewidth=0.8)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            model, task, share = setting
            axes.set_title(f"{model}, {task}, {100 * float(share):g} %", loc="left")
            axes.set_xlabel("gain in accuracy" if task == DEVIGN else "gain in bits per byte")


def meanings(cells: Sequence[Cell]) -> Meanings:
    """The plan of each arm."""
    arms = dict.fromkeys(str(cell["arm"]) for cell in cells)
    return {"arm": {arm: plan.to_dict() for arm in arms if (plan := ARMS[arm]) is not None}}


EXPERIMENT = Experiment(
    name="fine-tune",
    claim="A pretrained model that gets RSA heads with RSAConfig()'s defaults is better after fine-tuning than the "
    "same model without them, on little and on much data.",
    published="The paper detects defects in C functions too (section 4.3), with other models; its figures are not at "
    "hand. Without RSA, CodeBERT is reported at 62.08 % accuracy on all of Devign (CodeXGLUE).",
    seeds={"toy": 2, "quick": 4, "full": 5},
    cells=cells,
    run_cell=run_cell,
    conclude=conclude,
    draw=draw,
    summarise=summarise,
    meanings=meanings,
    parts=(*SETTING, "arm"),
    search_by=by_validation,
)
