"""`rsa-hf run`."""

from typing import Annotated, Any

import typer

from rsa_hf.run import run as run_program

# Keyword arguments of `app.command`: everything after PROGRAM belongs to the program, even --help.
PASS_THROUGH: Any = {"context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


def run(arguments: Annotated[list[str], typer.Argument(metavar="PROGRAM [ARGS]...", show_default=False)]) -> None:
    """Run a program that does not import rsa_hf, so that it can load patched checkpoints.

    PROGRAM is a console script of this environment, a Python file, or -m MODULE. The processes that it starts can load
    them too. Exit code and signals are the program's own.

    Example: rsa-hf run lm_eval --model hf --model_args pretrained=outputs/gpt2-rsa --tasks blimp
    """
    run_program(arguments)
