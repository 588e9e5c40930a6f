"""What `import rsa_hf` does beside giving names: it arms transformers and PEFT, and registers models."""

from __future__ import annotations

from rsa_hf.versions import require_transformers

__all__ = ["arm"]


def arm() -> None:
    """Install the hooks into transformers, have those into PEFT follow its import, register our models' Auto classes.

    Raises:
        ImportError: transformers does not fit.
    """
    require_transformers()
    # Behind the check: what these import from transformers may not be there in a version that does not fit.
    from rsa_hf import hooks, peft_hooks

    hooks.install()
    peft_hooks.arm()
    import rsa_hf.models  # noqa: F401
