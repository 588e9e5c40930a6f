"""What several commands do with a model: arm the hooks, find the folder, load it with the class it was saved with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsa_hf.cli.errors import UserError, user_input

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["arm", "load_checkpoint", "load_patched"]


def arm() -> None:
    """Do what `import rsa_hf` does elsewhere.

    Raises:
        UserError: transformers does not fit.
    """
    from rsa_hf import arming

    with user_input(ImportError):
        arming.arm()
    import transformers

    transformers.logging.disable_progress_bar()


def load_checkpoint(name: str) -> PreTrainedModel:
    """The model of a folder, a Hub name or `package:NAME/FOLDER`, with the class it was saved with.

    Raises:
        UserError: it cannot be found or read.
    """
    import transformers
    from safetensors import SafetensorError

    from rsa_hf.training.run import locate

    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise UserError(f"{name}: there is no such folder. Name the folder of a checkpoint, or a model on the Hub.")
    # A SafetensorError is a damaged file; a RuntimeError, transformers' word for tensors of other shapes.
    with user_input(ValueError, TypeError, OSError, ImportError, SafetensorError, RuntimeError):
        place = locate(str(Path(name).expanduser()) if name.startswith("~") else name)
        config = transformers.AutoConfig.from_pretrained(place)
        architectures = getattr(config, "architectures", None) or []
        auto: Any = transformers.AutoModel
        model: PreTrainedModel = getattr(transformers, next(iter(architectures), ""), auto).from_pretrained(place)
    return model


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
