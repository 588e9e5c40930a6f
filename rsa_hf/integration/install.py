"""Every touch on transformers' internals, but for the classes in `adapters/`. Importing `rsa_hf` installs them.

What PEFT adapters go through is in `peft_hooks.py`, also where it is transformers'; it follows the import of PEFT, as
`trainer.py` that of the Trainer.

Plain models are not affected. Each hook is checked before any is installed: where transformers has moved, importing
`rsa_hf` raises, says which hook does not fit and which versions do, and leaves transformers as it was.
"""

from __future__ import annotations

from rsa_hf.integration import attention, loading, locks, saving
from rsa_hf.integration.hooks import is_in_place, replace_all
from rsa_hf.models import register_all
from rsa_hf.utils.versions import require_transformers

__all__ = ["HOOKS", "install", "installed"]

HOOKS = (*attention.HOOKS, *loading.HOOKS, *saving.HOOKS, *locks.HOOKS)


def install() -> None:
    """Install all hooks and register the models of `rsa_hf.models`; does nothing where that has been done.

    Raises:
        ImportError: transformers is outside the supported range, or one of its internals is not as expected.
    """
    replace_all([hook for hook in HOOKS if not is_in_place(hook)], require_transformers())
    register_all()


def installed() -> dict[str, bool]:
    """Each hook by name, and whether it is in place."""
    return {f"{hook.owner.__name__}.{hook.name}": is_in_place(hook) for hook in HOOKS}
