"""What the commands share: how they end after a mistake, the hooks, loading a model, the settings of a run."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from rsa_hf.utils.locate import expanded, locate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print `error: …` and exit with code 2 if settings, files or packages do not fit, or training diverges."""
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError, SafetensorError, StrictDataclassError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def install_hooks() -> None:
    """Do what `import rsa_hf` does outside the command line, and switch off transformers' progress bars."""
    from rsa_hf.integration import install

    install()
    import transformers

    transformers.logging.disable_progress_bar()


def load_checkpoint(name: str) -> "PreTrainedModel":
    """Load a model, by any name, as the class it was saved with; the base model if config.json names no class.

    Damaged files make transformers raise errors of any type, so all are reported as a ValueError.
    """
    import transformers

    from rsa_hf.models import class_named

    place = locate(name)
    if Path(place, "adapter_config.json").is_file() and not Path(place, "config.json").exists():
        raise ValueError(
            f"{name} is a PEFT adapter, not a model. In Python: "
            f"rsa_hf.peft.load(base, {name!r}).merge_and_unload().save_pretrained(folder); then name that folder."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(place)
        named = config.architectures[0] if config.architectures else "AutoModel"
        model_class: Any = class_named(named, config.model_type) or getattr(transformers, named)
        model: PreTrainedModel = model_class.from_pretrained(place)
    except Exception as error:
        raise ValueError(f"{name} cannot be loaded ({type(error).__name__}: {error!s:.2000}).") from error
    return model


# Keyword arguments of `app.command` for a command that passes `--key value` on to `read_arguments`.
WITH_SETTINGS: Any = {
    "options_metavar": "[--key value …]",
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


def writable(name: str) -> Path:
    """A path to write to, checked before the work that takes long; a ValueError if it is in no place to write in."""
    path = Path(expanded(name))
    place = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not os.access(place, os.W_OK) or (not place.is_dir() and place != path.absolute()):
        raise ValueError(f"{path} cannot be written: {place} is no folder to write in. Choose another path.")
    return path


def task_module(task: str) -> Any:
    """The module of the task "defect" or "lm", imported after the hooks are installed."""
    install_hooks()
    return import_module(f"rsa_hf.tasks.{'defect_detection' if task == 'defect' else 'language_modeling'}")


def list_keys(task: str) -> Any:
    """The option --list-keys of a command that takes the keys of a task's runs: it prints them, then exits."""

    def show(wanted: bool) -> None:
        if wanted:
            task_module(task).main(["--help"])

    return typer.Option("--list-keys", is_eager=True, callback=show, help="Show all keys.")
