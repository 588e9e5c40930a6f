"""What `import rsa_hf` does beside giving names: it arms transformers and PEFT."""

from __future__ import annotations

from rsa_hf.versions import require_transformers

__all__ = ["arm"]


def arm() -> None:
    """Install the hooks into transformers, and have those into PEFT follow its import.

    Raises:
        ImportError: transformers does not fit.
    """
    require_transformers()
    # Behind the check: what these import from transformers may not be there in a version that does not fit.
    from rsa_hf import hooks, peft_hooks

    hooks.install()
    peft_hooks.arm()
