"""Forecasts of ETT and the weather: Informer, LogSparse and Transformer-XL with and without RSA heads (section 4.1).

All variables of a window of known steps are given, and all of a horizon predicted at once, on standardised data.
`series.py` has the data, `arms.py` the models, `settings.py` what is run and what was published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rsa_hf.experiments.forecasting.arms import ARMS, Task, make_forecaster, rsa_plan
from rsa_hf.experiments.forecasting.learning import learn, naive_errors, score
from rsa_hf.experiments.forecasting.series import load_series
from rsa_hf.experiments.forecasting.settings import PUBLISHED, cells
from rsa_hf.experiments.forecasting.tables import RATIO, by_validation, conclude, summarise
from rsa_hf.experiments.runner.cells import Cell, Result, Setting, Values
from rsa_hf.experiments.runner.experiment import Experiment, Meanings
from rsa_hf.experiments.runner.summary import find_rows
from rsa_hf.plots import COLOURS, panels

__all__ = ["EXPERIMENT"]


def run_cell(cell: Cell) -> Values:
    """Train one model, and score it on the test part. A seed has the same weights and windows for both arms."""
    series, seed = load_series(str(cell["series"])), int(cell["seed"])
    context, label, horizon, stride = (int(cell[name]) for name in ("context", "label", "horizon", "stride"))
    task = Task(context, label, horizon, series.values.shape[1], series.times.shape[1])
    shape = {name: int(cell[name]) for name in ("width", "encoder_layers", "decoder_layers", "dilation")}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_forecaster(str(cell["family"]), str(cell["arm"]), task, **shape).to(device)
        torch.manual_seed(seed)  # of dropout, and of the keys that ProbSparse attention draws
        errors = learn(
            model,
            series,
            task,
            steps=int(cell["steps"]),
            epochs=int(cell["epochs"]),
            batch=int(cell["batch"]),
            learning_rate=float(cell["learning_rate"]),
            stride=stride,
            seed=seed,
        )
        mse, mae = score(model, series, task, "test", stride)
    naive_mse, naive_mae = naive_errors(series, task, stride, int(cell["dilation"]))
    return {
        "mse": mse,
        "mae": mae,
        "validation mse": min(errors),
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
        "naive mse": naive_mse,
        "naive mae": naive_mae,
        "validation errors": errors,
    }


def draw(results: Sequence[Result], path: Path) -> None:
    """A panel for each series and horizon: the errors of each family and arm, beside the published ones."""
    rows = summarise(results)
    # Of what can be compared: a run that was broken off has some arms, or families, alone.
    compared = [row.settings for row in find_rows(rows, "mse", arm=RATIO)]
    groups = list(dict.fromkeys((str(each["series"]), int(each["horizon"])) for each in compared))
    with panels(path, len(groups), columns=2) as grid:
        for axes, (series, horizon) in zip(grid, groups, strict=True):
            same: dict[str, Setting] = {"series": series, "horizon": horizon}
            families = [str(row.settings["family"]) for row in find_rows(rows, "mse", arm=RATIO, **same)]
            for number, arm in enumerate(ARMS):
                places = [place + 0.27 * (number - 1) for place in range(len(families))]
                found = [find_rows(rows, "mse", family=family, arm=arm, **same) for family in families]
                for place, family, [row] in zip(places, families, found, strict=True):
                    axes.bar(place, row.mean, width=0.25, color=COLOURS[number], label=arm if place < 0.5 else None)
                    axes.errorbar(
                        place, row.mean, yerr=[[row.mean - row.low], [row.high - row.mean]], color="#333333", capsize=3
                    )
                    if published := PUBLISHED.get((series, horizon, family), {}).get(arm):
                        axes.plot(place, published, "D", color="#333333", markersize=4)
            [naive] = find_rows(rows, "mse", series=series, horizon=horizon, arm="none")
            axes.axhline(naive.mean, color="#666666", linewidth=0.8, linestyle="--")
            axes.set_title(f"{series}, {horizon} steps", loc="left")
            axes.set_xticks(range(len(families)), families)
            axes.set_ylabel("MSE")
            axes.set_xlabel("diamonds: published; dashes: the last period again", fontsize=7)
        grid[0].legend()


def meanings(cells: Sequence[Cell]) -> Meanings:
    """RSA's plan in each family, for each dilating factor."""
    families = dict.fromkeys((str(cell["family"]), int(cell["dilation"])) for cell in cells)
    return {"arm": {f"rsa, {family}, d = {d}": rsa_plan(family, d).to_dict() for family, d in families}}


EXPERIMENT = Experiment(
    name="forecasting",
    claim="The mean squared error of a forecast is lower with RSA heads than of the same model without them, and it "
    "is their recurrence that does it: with P of zeros it is higher.",
    published="MSE without and with RSA (section 4.1): "
    + "; ".join(
        f"{family}, {series}, {horizon} steps {errors['plain']:.3f} → {errors['rsa']:.3f}"
        for (series, horizon, family), errors in PUBLISHED.items()
    )
    + ".",
    remark="Published for Transformer-XL are figures of one that reads patches; here it reads single steps, without "
    "memory. Quick runs are short, have a narrow model and one learning rate for all: they compare arms, and are no "
    "forecasts to use where that the last period comes again has the lower error.",
    seeds={"toy": 2, "quick": 4, "full": 5},
    cells=cells,
    run_cell=run_cell,
    conclude=conclude,
    draw=draw,
    summarise=summarise,
    meanings=meanings,
    parts=("series", "horizon"),
    search_by=by_validation,
)
