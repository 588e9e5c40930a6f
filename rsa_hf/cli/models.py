"""What several commands do with a model: install the hooks, find the folder, load the class that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsa_hf.cli.errors import UserError, user_input
from rsa_hf.utils.brief import brief

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["install_hooks", "load_checkpoint", "load_patched"]


def install_hooks() -> None:
    """Do what `import rsa_hf` does outside of the command line, and switch off transformers' progress bars.

    Raises:
        UserError: the installed transformers is not supported.
    """
    from rsa_hf.integration import install

    with user_input(ImportError):
        install()
    import transformers

    transformers.logging.disable_progress_bar()


def load_checkpoint(name: str) -> PreTrainedModel:
    """Load a model with the class it was saved with; the base model where config.json names no class.

    Args:
        name: a folder, a name on the Hub, or `package:NAME/FOLDER`.

    Raises:
        UserError: it cannot be found or loaded. Damaged files make transformers raise errors of any type, so all of
            them are reported in this way.
    """
    import transformers

    from rsa_hf.utils.locate import locate

    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise UserError(f"{name}: there is no such folder. Name the folder of a checkpoint, or a model on the Hub.")
    try:
        place = locate(str(Path(name).expanduser()) if name.startswith("~") else name)
        config = transformers.AutoConfig.from_pretrained(place)
        model: PreTrainedModel = _class_of(name, config).from_pretrained(place)
    except (ValueError, TypeError, OSError, ImportError) as error:
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
        raise UserError(f"{name} is a plain checkpoint: it has no RSA heads.")
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
