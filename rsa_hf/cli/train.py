"""`rsa-hf train defect` and `rsa-hf train lm`; what commands that take a run's settings share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from rsa_hf.cli.errors import user_input
from rsa_hf.cli.models import install_hooks

__all__ = ["WITH_SETTINGS", "Config", "help_with_keys", "run_errors", "train"]

train = typer.Typer(no_args_is_help=True, help="Train a model, patched or plain, as a YAML file says.")

# Keyword arguments of `app.command` for a command that passes `--key value` on to `read_run_config`.
WITH_SETTINGS: Any = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run; configs/ has commented ones.")]


def help_with_keys(print_keys: Callable[[], object]) -> Any:
    """The option --help of a command whose CONFIG has keys.

    Args:
        print_keys: prints the keys and exits, as `read_run_config(["--help"], …)` does.
    """

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted:
            print(context.get_help())
            install_hooks()
            print_keys()

    return typer.Option(
        "--help", "--list-keys", is_eager=True, callback=show, help="Show this and the keys of CONFIG."
    )


@contextmanager
def run_errors() -> Iterator[None]:
    """Raise a `UserError` where a run cannot start or cannot go on."""
    from rsa_hf.training.steps import TrainingDivergedError

    with user_input(ValueError, OSError, ImportError, TrainingDivergedError):
        yield


def _train_defect(arguments: Sequence[str]) -> None:
    from rsa_hf.tasks.defect_detection import main

    main(arguments)


def _train_lm(arguments: Sequence[str]) -> None:
    from rsa_hf.tasks.language_modeling import main

    main(arguments)


@train.command(**WITH_SETTINGS)
def defect(
    context: typer.Context,
    config: Config,
    _: Annotated[bool, help_with_keys(lambda: _train_defect(["--help"]))] = False,
) -> None:
    """Train a defect detector. Words after CONFIG, as --key value, override its keys.

    On several processes: accelerate launch scripts/train_defect_detection.py CONFIG.

    Example: rsa-hf train defect configs/defect_minilm_embedded.yaml --max_steps 100 --output_dir outputs/defect
    """
    install_hooks()
    with run_errors():
        _train_defect([config, *context.args])


@train.command(**WITH_SETTINGS)
def lm(
    context: typer.Context,
    config: Config,
    _: Annotated[bool, help_with_keys(lambda: _train_lm(["--help"]))] = False,
) -> None:
    """Train a causal language model. Words after CONFIG, as --key value, override its keys.

    On several processes: accelerate launch scripts/train_language_model.py CONFIG.

    Example: rsa-hf train lm configs/lm_bytes_embedded.yaml --max_steps 100 --rsa null
    """
    install_hooks()
    with run_errors():
        _train_lm([config, *context.args])
