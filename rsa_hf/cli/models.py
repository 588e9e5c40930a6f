"""What several commands do with a model: arm the hooks, find the folder, load it with the class it was saved with."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsa_hf.cli.errors import UserError, user_input
from rsa_hf.utils.brief import brief

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["arm", "load_checkpoint", "load_patched"]

# Where transformers reads config.json and the index of shards, and reports tensors of other shapes.
READING = ("transformers/configuration_utils.py", "transformers/utils/hub.py", "transformers/utils/loading_report.py")


def arm() -> None:
    """Do what `import rsa_hf` does elsewhere.

    Raises:
        UserError: transformers does not fit.
    """
    from rsa_hf.integration import install

    with user_input(ImportError):
        install()
    import transformers

    transformers.logging.disable_progress_bar()


def load_checkpoint(name: str) -> PreTrainedModel:
    """The model of a folder, a Hub name or `package:NAME/FOLDER`, with the class it was saved with.

    Where its config.json names no class, it is the base model.

    Raises:
        UserError: it cannot be found or read, or its class is not there.
    """
    import transformers
    from safetensors import SafetensorError

    from rsa_hf.utils.locate import locate

    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise UserError(f"{name}: there is no such folder. Name the folder of a checkpoint, or a model on the Hub.")
    with user_input(ValueError):
        place = locate(str(Path(name).expanduser()) if name.startswith("~") else name)
    with user_input(ValueError, TypeError, OSError, ImportError, SafetensorError), _damage_named(name):
        config = transformers.AutoConfig.from_pretrained(place)
        model: PreTrainedModel = _class_of(name, config).from_pretrained(place)
    return model


def _class_of(name: str, config: Any) -> Any:
    """The class that the config of a checkpoint names, of transformers or of ours; AutoModel where it names none.

    Raises:
        ValueError: it is in neither. Another class would leave out what it does not have, such as the head.
    """
    import transformers

    from rsa_hf.models import class_named

    named = config.architectures  # what the file holds, of whatever type
    if not named:
        return transformers.AutoModel
    architecture = named[0] if isinstance(named, list) else named
    if isinstance(architecture, str):
        for found in (class_named(architecture, config.model_type), getattr(transformers, architecture, None)):
            # It may be anything that transformers has.
            if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and found.config_class:
                return found
    raise ValueError(
        f"{name}: its config.json names the class {brief(architecture)}, which neither transformers "
        f"{transformers.__version__} nor rsa_hf has for models of type {brief(config.model_type)}. Correct "
        "`architectures` there; without that entry the base model is loaded, without a head."
    )


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Make a ValueError of what transformers trips over in damaged files. Faults pass, those of rsa_hf among them.

    Raises:
        ValueError: the files of the checkpoint are damaged, or do not fit each other.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError):
        raise
    except Exception as error:
        if not _comes_of_files(error):
            raise
        raise ValueError(
            f"{name}: the files of this checkpoint are damaged, or do not fit each other ({type(error).__name__}: "
            f"{error!s:.2000})."
        ) from error


def _comes_of_files(error: Exception) -> bool:
    """Whether transformers raised an error, and about what it read: nothing of rsa_hf, nor the machine, nor torch.

    A config's odd values end in errors of many types (KeyError: 'gelu_nev'), but not in a RuntimeError, which says as
    often that there is no memory, or that something in a computation is wrong.
    """
    files = [Path(frame.filename).as_posix() for frame in traceback.extract_tb(error.__traceback__)]
    package = Path(__file__).parents[1].as_posix()
    ours = [place for place, file in enumerate(files) if file.startswith(package)]
    called = files[ours[-1] + 1 :]
    if not called or "/transformers/" not in called[0]:
        return False
    return not isinstance(error, RuntimeError) or any(file.endswith(READING) for file in called)


def load_patched(name: str) -> PreTrainedModel:
    """The same, of a model with RSA heads.

    Raises:
        UserError: it cannot be found or read, or has no RSA heads.
    """
    from rsa_hf.patching import is_patched

    model = load_checkpoint(name)
    if not is_patched(model):
        raise UserError(f"{name} is a plain checkpoint: it has no RSA heads.")
    return model
