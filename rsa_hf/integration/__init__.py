"""All contact with transformers, PEFT and huggingface_hub. hook_table.py lists what is hooked, and why."""

import functools

import transformers
from packaging.version import Version

__all__ = ["TRANSFORMERS_RANGE", "install", "what_fits"]

TRANSFORMERS_RANGE = ("5.17", "5.25")  # tested at both ends; the upper end is excluded


def what_fits() -> str:
    """The supported range of transformers and the installed version, as a sentence for messages."""
    low, high = TRANSFORMERS_RANGE
    return f"rsa_hf works with transformers ≥ {low}, < {high}; installed is {transformers.__version__}."


@functools.cache
def install() -> None:
    """Install the hooks of hook_table.py, once in a process; an ImportError if they do not fit transformers."""
    low, high = TRANSFORMERS_RANGE
    if not Version(low) <= Version(transformers.__version__) < Version(high):
        raise ImportError(f"{what_fits()} Install one that fits: pip install 'transformers>={low},<{high}'")
    # Imported here: a version outside the range may lack what these modules import.
    try:
        from rsa_hf.integration import hook_table
    except ImportError as error:
        raise ImportError(
            f"{what_fits()} Something that rsa_hf needs is not there: {error}. Install a version that rsa_hf was "
            "tested with, or a newer rsa_hf."
        ) from error
    hook_table.install()
