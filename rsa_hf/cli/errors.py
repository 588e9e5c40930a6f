"""What a user did wrong, as against what this program does wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["UserError", "user_input"]


class UserError(Exception):
    """A mistake of the user's: its message is all that is shown."""


@contextmanager
def user_input(*errors: type[Exception]) -> Iterator[None]:
    """Errors of these kinds are the user's where they come from what the user gave: names, files, settings.

    Only for the steps that read those. What fails later is a fault of ours, and is shown as one.

    Args:
        errors: the kinds; default ValueError, OSError and ImportError, which is what rsa_hf, transformers and
            huggingface_hub raise for a setting, a file or a name that does not fit, or a package that is missing.
    """
    kinds = errors or (ValueError, OSError, ImportError)
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error
