"""What the commands share: user errors, the hooks, loading a model, the settings of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rsa_hf.utils.text import brief

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def install_hooks() -> None:
    """Do what `import rsa_hf` does outside of the command line, and switch off transformers' progress bars."""
    from rsa_hf.integration import install

    with user_input():
        install()
    import transformers

    transformers.logging.disable_progress_bar()


def load_checkpoint(name: str) -> PreTrainedModel:
    """Load a model, by any name, with the class it was saved with; the base model where config.json names no class.

    Damaged files make transformers raise errors of any type, so all are reported as a `UserError`.
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


def _class_of(name: str, config: Any) -> Any:
    """The class that the config of a checkpoint names; another one would drop weights, such as the head's."""
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


# Keyword arguments of `app.command` for a command that passes `--key value` on to `read_arguments`.
WITH_SETTINGS: Any = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


def task_module(task: str) -> Any:
    """The module of the task "defect" or "lm"."""
    return import_module(f"rsa_hf.tasks.{'defect_detection' if task == 'defect' else 'language_modeling'}")


def help_with_keys(print_keys: Callable[[], object]) -> Any:
    """The option --help of a command whose keys `print_keys` prints, and exits, as `read_arguments(["--help"], …)`."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted:
            print(context.get_help())
            install_hooks()
            print_keys()

    return typer.Option("--help", "--list-keys", is_eager=True, callback=show, help="Show this and all keys.")
