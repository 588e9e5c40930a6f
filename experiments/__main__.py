"""The command `python -m experiments NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from rsa_hf.cli.common import UserError, exit_on_error, install_hooks, user_input

REPORT = ("report", "page")  # "page" is its name in 0.1


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment, or one of: all, list, report.")],
    full: Annotated[
        bool, typer.Option("--full/--quick", help="The large size, or one that takes minutes on two cores.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for RESULTS.md and results/reproduce.")] = Path("."),
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default the experiment's own.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SETTING=VALUE", help="Run a part, e.g. model=1M or model=1M,2M. May be repeated."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default one per core, or per GPU.")] = None,
) -> None:
    """Run an experiment of the paper and write its table, figure and verdict. An interrupted one continues.

    `list` shows the names, `all` runs every experiment, `report` only writes tables and RESULTS.md again from the
    stored runs. Data is read from the folder in the environment variable RSA_HF_DATA.

    Example: python -m experiments linear-rnn --quick
    """
    install_hooks()
    from experiments.runner.data import MissingDataError
    from experiments.runner.experiment import EXPERIMENTS, Size, find_experiment
    from experiments.runner.processes import default_jobs, workers
    from experiments.runner.report import keep_total_time, nothing_has_run, write_report
    from experiments.runner.runner import RequestError, rebuild_results, run_experiment

    given = {"--full": full, "--seeds": seeds, "--only": only, "--jobs": jobs}
    for_a_run = [option for option, value in given.items() if value]
    if name in ("list", *REPORT) and for_a_run:
        raise UserError(f"{', '.join(for_a_run)}: {name} runs no experiment. Name one instead.")
    if name == "list":
        for each, about in EXPERIMENTS.items():
            print(f"{each:18} {about}")
        return
    if name in REPORT:
        with user_input():
            rebuild_results(out)
        print(f"written: {write_report(out)}")
        return
    chosen = list(EXPERIMENTS) if name == "all" else [name]
    size: Size = "full" if full else "quick"
    parts = _parts(only or [])
    if parts and name == "all":
        raise UserError("--only selects settings of one experiment. Name it instead of all.")
    jobs = jobs or default_jobs()
    with user_input():
        whole = name == "all" and seeds is None and nothing_has_run(out, size, chosen)
    missing, start = [], perf_counter()
    with workers(jobs) as executor:
        for each in chosen:
            with user_input():
                experiment = find_experiment(each)
            try:
                conclusion = run_experiment(experiment, size, out, seeds, only=parts, executor=executor)
            except RequestError as error:
                raise UserError(str(error)) from error
            except ModuleNotFoundError:
                raise  # a fault: a package that the user has to install is reported as an ImportError
            except (MissingDataError, ImportError) as error:
                missing.append(f"{each}: {error}")
                continue
            print(f"{each}: {conclusion}")
    if whole and not missing:
        keep_total_time(out, size, perf_counter() - start, jobs)
    print(f"written: {write_report(out)}")
    if missing:
        raise UserError("not run: " + "; ".join(missing))


def _parts(only: Sequence[str]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for each in only:
        name, sign, values = each.partition("=")
        if not sign or not values:
            raise UserError(f"--only {each}: SETTING=VALUE is needed, e.g. model=1M.")
        parts.setdefault(name, []).extend(values.split(","))
    return parts


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an experiment and exit: 0, or 2 after a user's mistake.

    Args:
        arguments: the arguments after `python -m experiments`; None: those of the process.
    """
    with exit_on_error():
        app(arguments, prog_name="python -m experiments")


if __name__ == "__main__":
    main()
