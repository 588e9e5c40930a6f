"""Every touch on transformers, PEFT and huggingface_hub. seam.py is the table of what is hooked, and why."""

from __future__ import annotations

from rsa_hf.utils.versions import require_transformers

__all__ = ["install", "installed"]


def install() -> None:
    """Install the hooks of seam.py; does nothing where they are installed already.

    Raises:
        ImportError: transformers is outside the supported range, or something that rsa_hf needs is not there.
    """
    supported = require_transformers()
    # Imported here: a version outside the range may lack what these modules import.
    try:
        from rsa_hf.integration import seam
    except ImportError as error:
        raise ImportError(
            f"{supported} Something that rsa_hf needs is not there: {error}. Install a version that rsa_hf was "
            "tested with, or a newer rsa_hf."
        ) from error
    seam.install()


def installed() -> dict[str, bool]:
    """Each hook by name, and whether it is in place."""
    from rsa_hf.integration import seam

    return seam.installed()
