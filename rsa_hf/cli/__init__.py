"""`rsa-hf`: the command line, one file a command.

A user's mistake ends in one line on stderr and exit code 2; anything else that goes wrong is a fault, keeps its
traceback and ends in 1. Commands import what they need when they run, so that `rsa-hf --help` answers at once.
"""

from __future__ import annotations

import sys

import typer

from rsa_hf.cli.card import card
from rsa_hf.cli.convert import convert_transformer_xl
from rsa_hf.cli.doctor import doctor
from rsa_hf.cli.errors import UserError
from rsa_hf.cli.evaluate import evaluate
from rsa_hf.cli.inspect import inspect
from rsa_hf.cli.patch import patch
from rsa_hf.cli.push import push
from rsa_hf.cli.reproduce import reproduce
from rsa_hf.cli.search_heads import search_heads
from rsa_hf.cli.train import PASSED_ON, train

__all__ = ["main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (patch, inspect, card, push, convert_transformer_xl, doctor, reproduce):
    app.command()(command)
app.command(context_settings=PASSED_ON)(search_heads)
app.add_typer(train, name="train")
app.add_typer(evaluate, name="evaluate")


@app.callback()
def _about() -> None:
    """Self-attention with recurrence (RSA) for any pretrained Hugging Face Transformer."""


def main() -> None:
    """Run the command line; the exit code is 0, 2 after a user's mistake, or what the command says."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
