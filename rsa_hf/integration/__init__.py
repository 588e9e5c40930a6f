"""What `import rsa_hf` does beside giving names: it arms transformers, its Trainer, and PEFT."""

from __future__ import annotations

from rsa_hf.utils.versions import require_transformers

__all__ = ["arm"]


def arm() -> None:
    """Install the hooks into transformers, and have those into the Trainer and into PEFT follow their imports.

    Raises:
        ImportError: transformers does not fit.
    """
    fits = require_transformers()
    # Behind the check: what these import from transformers may not be there in a version that does not fit.
    try:
        from rsa_hf.integration import install, trainer
        from rsa_hf.integration.peft import hooks as peft_hooks
    except ImportError as error:
        raise ImportError(
            f"{fits} Something that rsa_hf needs is not there: {error}. Install a version that rsa_hf was tested "
            "with, or a newer rsa_hf."
        ) from error

    install.install()
    trainer.arm()
    peft_hooks.arm()
