"""The command line `rsa-hf`, one file per command.

A user's mistake (a ValueError, OSError or ImportError) or a loss that diverges prints one line on stderr and exits
with code 2. Any other error keeps its traceback and exits with code 1. Commands import what they need when they run,
so that `rsa-hf --help` answers at once.
"""

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from rsa_hf.cli.audit import audit
from rsa_hf.cli.calibrate import calibrate
from rsa_hf.cli.common import WITH_SETTINGS, exit_on_error
from rsa_hf.cli.doctor import doctor
from rsa_hf.cli.evaluate import evaluate
from rsa_hf.cli.inspect import inspect
from rsa_hf.cli.patch import patch
from rsa_hf.cli.predict import predict
from rsa_hf.cli.run_program import PASS_THROUGH, run
from rsa_hf.cli.train import train

__all__ = ["main"]

settings = {"help_option_names": ["--help", "-h"]}
app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, context_settings=settings
)
for command in (patch, calibrate, inspect, doctor):
    app.command()(command)
app.command(**PASS_THROUGH)(run)
for with_keys in (audit, predict):
    app.command(**WITH_SETTINGS)(with_keys)
app.add_typer(train, name="train")
app.add_typer(evaluate, name="evaluate")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rsa_hf {metadata.version('rsa_hf')}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version.")
    ] = False,
) -> None:
    """Self-attention with recurrence (RSA) for pretrained Hugging Face Transformers."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, by default this process's own, and exit with 0, 2 after a user's mistake, or its own code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack σ or θ
    with exit_on_error():
        app(arguments)
