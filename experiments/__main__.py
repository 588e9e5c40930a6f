"""The command `python -m experiments NAME`."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Annotated

import transformers
import typer

from experiments.runner.experiment import EXPERIMENTS, RequestError, Size, find_experiment
from experiments.runner.processes import default_jobs, workers
from experiments.runner.resources import MissingDataError
from experiments.runner.results_page import write_report
from experiments.runner.runner import rebuild_results, run_experiment


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment, or one of: all, list, report.")],
    full: Annotated[
        bool, typer.Option("--full/--quick", help="The large size, or one that takes minutes on two cores.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for RESULTS.md and results/.")] = Path("."),
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default the experiment's own.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SETTING=VALUE", help="Run a part, e.g. model=1M or model=1M,2M. May be repeated."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default one per core, or per GPU.")] = None,
) -> None:
    """Run an experiment of the paper and write its table, figure and verdict. An interrupted one continues.

    `list` shows the names, `all` runs every experiment of the report, `report` only writes tables, RESULTS.md and the
    table of README again from the stored runs. Data is read from the folder in the environment variable RSA_HF_DATA.

    Example: python -m experiments language-model --quick
    """
    transformers.logging.disable_progress_bar()
    size: Size = "full" if full else "quick"
    if name == "list":
        for each, about in EXPERIMENTS.items():
            print(f"{each:18} {about}")
        print("blimp              BLiMP by lm-eval: SmolLM2 plain, with shut gates, with RSAConfig() and calibrated")
        return
    if name == "blimp":
        import_module("experiments.blimp").write_page(out / "results", size)  # it needs lm_eval
        return
    if name == "report":
        rebuild_results(out)
        import_module("experiments.evidence").write_evidence(out)  # it imports several experiments
        print(f"written: {write_report(out)}")
        return
    missing, parts, jobs = [], _parts(only or []), jobs or default_jobs()
    with nullcontext() if jobs == 1 else workers(jobs) as executor:
        for each in EXPERIMENTS if name == "all" else [name]:
            try:
                conclusion = run_experiment(find_experiment(each), size, out, seeds, parts, executor=executor)
                print(f"{each}: {conclusion}")
            except (MissingDataError, ImportError) as error:
                missing.append(f"{each}: {error}")
    print(f"written: {write_report(out)}")
    if missing:
        raise RequestError("not run: " + "; ".join(missing))


def _parts(only: Sequence[str]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for each in only:
        name, sign, values = each.partition("=")
        if not sign or not values:
            raise RequestError(f"--only {each}: SETTING=VALUE is needed, e.g. model=1M.")
        parts.setdefault(name, []).extend(values.split(","))
    return parts


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an experiment and exit: 0, or 2 after a user's mistake."""
    try:
        app(arguments, prog_name="python -m experiments")
    except (RequestError, MissingDataError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
