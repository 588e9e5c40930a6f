"""What the commands share: user errors, the hooks, loading a model, the settings of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rsa_hf.utils.text import brief

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "WITH_SETTINGS",
    "UserError",
    "exit_on_error",
    "help_with_keys",
    "install_hooks",
    "load_checkpoint",
    "load_patched",
    "user_input",
]

# --- errors -------------------------------------------------------------------------------------------------

USER_ERRORS = (ValueError, OSError, ImportError)  # settings, files and names that do not fit, and missing packages


class UserError(Exception):
    """A user's mistake. Only its message is shown."""


@contextmanager
def user_input(*more: type[Exception]) -> Iterator[None]:
    """Raise a `UserError` for ValueError, OSError, ImportError and `more`, around steps that read user input."""
    errors: tuple[type[Exception], ...] = (*USER_ERRORS, *more)
    try:
        yield
    except errors as error:
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


# --- models -------------------------------------------------------------------------------------------------


def install_hooks() -> None:
    """Do what `import rsa_hf` does outside of the command line, and switch off transformers' progress bars.

    Raises:
        UserError: the installed transformers is not supported.
    """
    from rsa_hf.integration import install

    with user_input():
        install()
    import transformers

    transformers.logging.disable_progress_bar()


def load_checkpoint(name: str) -> PreTrainedModel:
    """Load a model with the class it was saved with; the base model where config.json names no class.

    Args:
        name: a folder, a name on the Hub, or `package:NAME/FOLDER`.

    Raises:
        UserError: it cannot be found or loaded. Damaged files make transformers raise errors of any type, so all
            errors are reported in this way.
    """
    import transformers

    from rsa_hf.utils.locate import locate

    with user_input():
        place = locate(name)
    if place.startswith((".", "/")) and not Path(place).is_dir():
        raise UserError(f"{name}: there is no such folder. Name the folder of a checkpoint, or a model on the Hub.")
    try:
        config = transformers.AutoConfig.from_pretrained(place)
        model: PreTrainedModel = _class_of(name, config).from_pretrained(place)
    except (*USER_ERRORS, TypeError) as error:
        raise UserError(str(error)) from error
    except Exception as error:
        raise UserError(f"{name} cannot be loaded ({type(error).__name__}: {error!s:.2000}).") from error
    return model


def load_patched(name: str) -> PreTrainedModel:
    """Load a model as `load_checkpoint` does, and require RSA heads.

    Raises:
        UserError: it cannot be found or loaded, or has no RSA heads.
    """
    from rsa_hf.patching import is_patched

    model = load_checkpoint(name)
    if not is_patched(model):
        raise UserError(f"{name} is a plain checkpoint: it has no RSA heads. Patch it first: rsa-hf patch.")
    return model


def _class_of(name: str, config: Any) -> Any:
    """Find the class that the config of a checkpoint names; AutoModel where it names none.

    Raises:
        ValueError: neither transformers nor rsa_hf has it. Another class would drop weights, such as the head's.
    """
    import transformers

    from rsa_hf.models import class_named

    named = config.architectures
    if not named:
        return transformers.AutoModel
    architecture = named[0] if isinstance(named, list) else named
    if isinstance(architecture, str):
        for found in (class_named(architecture, config.model_type), getattr(transformers, architecture, None)):
            if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and found.config_class:
                return found
    raise ValueError(
        f"{name}: its config.json names the class {brief(architecture)}, which neither transformers "
        f"{transformers.__version__} nor rsa_hf has for models of type {brief(config.model_type)}. Correct "
        "`architectures` there, or delete it to load the base model without a head."
    )


# --- commands that take a run's settings --------------------------------------------------------------------

# Keyword arguments of `app.command` for a command that passes `--key value` on to `read_arguments`.
WITH_SETTINGS: Any = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


def help_with_keys(print_keys: Callable[[], object]) -> Any:
    """The option --help of a command with the keys of a run.

    Args:
        print_keys: prints the keys and exits, as `read_arguments(["--help"], …)` does.
    """

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted:
            print(context.get_help())
            install_hooks()
            print_keys()

    return typer.Option("--help", "--list-keys", is_eager=True, callback=show, help="Show this and all keys.")
