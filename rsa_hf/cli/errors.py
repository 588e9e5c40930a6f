"""Errors of the user's, as opposed to faults of the program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["UserError", "exit_on_error", "user_input"]


class UserError(Exception):
    """A user's mistake. Only its message is shown."""


@contextmanager
def user_input(*errors: type[Exception]) -> Iterator[None]:
    """Raise a `UserError` in place of errors of these kinds, around steps that read what the user gave.

    Args:
        errors: the kinds; default ValueError, OSError and ImportError, which rsa_hf, transformers and huggingface_hub
            raise for settings, files and names that do not fit and for missing packages.
    """
    kinds = errors or (ValueError, OSError, ImportError)
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error


@contextmanager
def exit_on_error(*errors: type[Exception]) -> Iterator[None]:
    """Print `error: …` and exit with code 2 on a `UserError`, or an error of these kinds."""
    kinds: tuple[type[Exception], ...] = (UserError, *errors)
    try:
        yield
    except kinds as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
